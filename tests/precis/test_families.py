"""Unsupported models are refused in plain words; RoPE can be undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precis import native, rope
from precis.attention.plug import attach
from precis.errors import UnsupportedModel
from precis.families import Rotary, weight_digest
from tests.precis.build import attached, read, tokens
from tests.precis.test_native import FILES
from tests.tiny import tiny

_LAYERS = ["sliding_attention", "full_attention"] * 2
_SHARED_KV = {"num_kv_shared_layers": 2, "layer_types": _LAYERS, "head_dim": 16}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
_MLA_HEADS = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8}
_MLA_EXPERTS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_MLA = {**_MLA_HEADS, **_MLA_EXPERTS, "moe_intermediate_size": 16}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", _DYNAMIC, "dynamic RoPE"),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
    ("gpt2", {}, "attention"),
    ("deepseek_v3", _MLA, "latent"),
    ("gemma3n_text", _SHARED_KV, "share"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_models_without_a_plain_cache_are_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        attach(tiny(family, **changes))


def test_longrope_models_are_served_up_to_their_original_length() -> None:
    half = 12 // 2
    rope = {"rope_type": "longrope", "short_factor": [1.0] * half, "long_factor": [4.0] * half, "rope_theta": 1e4,
            "original_max_position_embeddings": 100, "factor": 4.0}  # fmt: skip
    changes = {"sliding_window": None, "rope_parameters": rope, "original_max_position_embeddings": 100}
    model = attached("phi3", max_position_embeddings=400, **changes)
    assert model.geometry.max_length == 100


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "cohere", "glm4"])
def test_rope_can_be_undone_and_redone(family: str) -> None:
    changes = {"head_dim": 16} if family == "glm4" else {}
    model = attached(family, **changes)
    full = read(model, tokens(100))
    rotary = Rotary(model, 512)
    positions = torch.arange(100, dtype=torch.int32)
    for layer in range(4):
        keys = full.keys[layer, 0]
        before = rotary.undo(layer, keys, positions)
        assert float((before - keys)[50:].abs().max()) > 0.01  # it does turn
        torch.testing.assert_close(rotary.redo(layer, before, positions), keys, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", [None, *FILES], ids=lambda path: path.stem if path else "torch")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "cohere", "glm4"])
def test_rope_is_the_same_in_place(
    family: str, path: Path | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "library", lambda: native.opened(path) if path else None)
    rotary = Rotary(attached(family, **({"head_dim": 16} if family == "glm4" else {})), 512)
    positions = torch.randperm(512, generator=torch.Generator().manual_seed(1)).to(torch.int32)[:100]
    keys = torch.randn(100, rotary.head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = [
        rotary.redo(layer, keys[part], positions[part]) for layer, part in ((2, slice(60)), (3, slice(60, 100)))
    ]
    rotary.redo_in_place(range(2, 4), keys, positions, [60, 40])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(keys.float(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    by_halves = {rotary.turns_halves(layer) for layer in (2, 3)}
    assert by_halves == {path is not None and family not in {"cohere", "glm4"}}  # which turn neighbours


def test_a_position_beyond_the_tables_is_refused() -> None:
    rotary = Rotary(attached("llama"), 512)
    for beyond in (512, -513):
        with pytest.raises(IndexError):
            rotary.redo_in_place(range(1), torch.ones(1, 12), torch.tensor([beyond], dtype=torch.int32), [1])


def test_keys_before_rope_are_what_the_projection_gave() -> None:
    model = attached("llama")
    grabbed: list[torch.Tensor] = []
    hook = model.hf.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: grabbed.append(args[2][0]))
    full = read(model, tokens(64), chunk=64)
    hook.remove()
    found = Rotary(model, 512).undo(1, full.keys[1, 0], torch.arange(64, dtype=torch.int32))
    torch.testing.assert_close(found, grabbed[0][:, :12], atol=1e-5, rtol=0)


def test_the_weight_digest_sees_one_changed_weight_and_nothing_else() -> None:
    model = tiny()
    before = weight_digest(model)
    assert weight_digest(tiny()) == before
    model.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1e-4
    assert weight_digest(model) != before


def test_the_attention_function_refuses_to_run_without_a_store() -> None:
    model = attached()
    with pytest.raises(RuntimeError, match="kv_store"):
        model.hf(input_ids=torch.tensor([[1, 2]]), use_cache=False)
