"""The decoder in C++ gives the logits that transformers gives, at every instruction level that this machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from precis import native
from precis.decoder import Decoder
from precis.engine import nothing_read, step
from precis.families import Model, Rotary
from precis.session import Feed, Session
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens
from tests.precis.test_native import FILES

pytestmark = pytest.mark.skipif(not FILES, reason="there is no compiled file")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One compiled file in use."""
    found = native.opened(Path(request.param))
    for module in ("attention.ragged", "decoder"):
        monkeypatch.setattr(f"precis.{module}.library", lambda: found)
    return Path(request.param)


def with_native(model: Model) -> Model:
    found = Decoder.of(model, Rotary(model, 2048))
    assert found is not None
    return replace(model, native=found)


def answers(model: Model, snapshots: list[Any], questions: list[list[int]]) -> list[Tensor]:
    """Logits of questions on the snapshots, packed, and of three tokens of each answer."""
    sessions = [Session.on(snapshot) for snapshot in snapshots]
    feeds = [Feed(s, q, last=True, all_logits=i == 0) for i, (s, q) in enumerate(zip(sessions, questions, strict=True))]
    logits = step(model, feeds)
    for token in (7, 11, 19):
        logits += step(model, [Feed(session, [token + i]) for i, session in enumerate(sessions)])
    assert all(np.all(s.tail.counts == len(q) + 3) for s, q in zip(sessions, questions, strict=True))
    return logits


def compare(model: Model, snapshots: list[Any], sizes: tuple[int, ...], limit: float) -> None:
    questions = [tokens(n, seed=20 + n).tolist() for n in sizes]
    found = answers(with_native(model), snapshots, questions)
    for got, expected in zip(found, answers(model, snapshots, questions), strict=True):
        assert float((got - expected).abs().max()) <= limit * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_packed_steps_equal_those_of_transformers(level: Path, family: str, dtype: torch.dtype) -> None:
    model = attached(family)
    g = model.geometry
    full = [read(model, tokens(N_CONTEXT, seed)) for seed in range(2)]
    model.hf.to(dtype)
    snapshots = []
    for seed, part in enumerate(full):
        keep = torch.rand(g.n_layers, g.n_kv_heads, N_CONTEXT, generator=torch.Generator().manual_seed(seed)) < 0.4
        made = cut(part, keep)
        snapshots.append(replace(made, keys=made.keys.to(dtype), values=made.values.to(dtype)))
    compare(model, [snapshots[0], snapshots[0], snapshots[1]], (9, 20, 1), 1e-4 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64, "hidden_size": 96, "intermediate_size": 160},  # whole tiles
        {"head_dim": 64, "hidden_size": 72, "intermediate_size": 100},  # matrices of no whole tile
        {"head_dim": 80, "num_attention_heads": 6, "num_key_value_heads": 2},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: next(iter(changes.items())).__repr__(),
)
def test_sizes_of_every_kind_equal_transformers(level: Path, changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = attached("llama", **changes)
    model.hf.to(dtype)
    for sizes in ((1,), (3, 14), (40, 1, 1)):
        compare(model, [nothing_read(model)] * len(sizes), sizes, 1e-4 if dtype == torch.float32 else 0.06)


def test_models_that_it_does_not_know_are_left_to_transformers() -> None:
    for family in ("gemma2", "gpt_oss", "phi3", "cohere", "granite", "smollm3", "qwen3_moe"):
        model = attached(family)
        assert Decoder.of(model, Rotary(model, 64)) is None, family
    model = attached("llama")
    layer = model.decoder.layers[0]
    layer.mlp.act_fn = nn.GELU()
    assert Decoder.of(model, Rotary(model, 64)) is None
    model = attached("llama")
    other = nn.Linear(8, 8)
    other.weight = model.decoder.layers[0].self_attn.q_proj.weight
    model.decoder.layers[0].self_attn.q_proj = nn.Sequential(other)  # an adapter, say
    assert Decoder.of(model, Rotary(model, 64)) is None


def test_wrong_tokens_are_refused_and_large_steps_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_native(attached("llama"))
    session = Session.on(nothing_read(model))
    with pytest.raises(ValueError, match="fit"):
        step(model, [Feed(session, [10**6])])
    far = Session.on(nothing_read(model))
    far.tail.n_tokens = 2048
    with pytest.raises(ValueError, match="fit"):
        step(model, [Feed(far, [1])])
    assert not session.tail.counts.any()
    limit = model.native.max_tokens
    monkeypatch.setattr("precis.decoder.library", lambda: 1 / 0)
    step(model, [Feed(session, tokens(limit + 1).tolist())])
    with pytest.raises(ZeroDivisionError):
        step(model, [Feed(session, [3])])
