"""The C++ backend of packed steps equals the torch reference, at every instruction level that this machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precis import native
from precis.attention import ragged
from precis.attention.ragged import New
from precis.attention.torch_ref import Segment, attend
from precis.engine import step
from precis.session import Feed, Session
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens
from tests.precis.test_native import FILES


@dataclass(frozen=True)
class Case:
    new: New
    segments: list[Segment]
    sinks: Tensor | None
    options: dict[str, float | int | None]


def case(
    seed: int,
    head_dim: int,
    n: int = 3,
    group: int = 3,
    n_kv_heads: int = 2,
    lengths: tuple[int, ...] = (600, 7),
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    bias: bool = False,
    causal: bool = False,
) -> Case:
    """Rows of n tokens at positions 1000.., which read per kv head one run for all and one for the last tokens only."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    positions = torch.arange(1000, 1000 + n, dtype=torch.int32)
    segments = []
    for head in range(n_kv_heads):
        for index, length in enumerate(lengths):
            last = causal and index == len(lengths) - 1
            first = 0 if index == 0 else n // 2
            where = (
                torch.arange(1000 + n - length, 1000 + n) if last else torch.randperm(990, generator=generator)[:length]
            )
            keys, values = some(length, head_dim), some(length, head_dim)
            weights = torch.randn(length, generator=generator) if bias else None
            rows = ((head * n + first) * group, (head + 1) * n * group)
            segments.append(Segment(keys, values, where.int(), rows, last, weights))
    own = some(n_kv_heads, n, head_dim)
    new = New(some(n_kv_heads * group, n, head_dim), own, own, positions)
    logits = torch.randn(n_kv_heads * group, generator=generator) if sinks else None
    return Case(new, segments, logits, {"scaling": 0.7 / head_dim**0.5 * 3, "window": window, "softcap": softcap})


def expected_of(made: Case) -> Tensor:
    """[H, n, D] by torch."""
    n_heads, n, head_dim = made.new.query.shape
    n_kv_heads = made.new.key.shape[0]
    rows = made.new.query.reshape(n_kv_heads, -1, n, head_dim).transpose(1, 2)
    group = rows.shape[2]
    sinks = made.sinks
    if sinks is not None:
        sinks = sinks.reshape(n_kv_heads, 1, group).expand(-1, n, -1).reshape(-1)
    positions = made.new.positions.repeat_interleave(group).repeat(n_kv_heads)
    found = attend(rows.float().reshape(-1, head_dim), positions, made.segments, sinks=sinks, **made.options)  # type: ignore[arg-type]
    return found.reshape(rows.shape).transpose(1, 2).reshape(n_heads, n, head_dim)


def check(made: Case) -> None:
    expected = expected_of(made)
    found = ragged.attend(made.new, ragged.runs_of(made.segments), sinks=made.sinks, **made.options)  # type: ignore[arg-type]
    assert found.dtype == made.new.query.dtype
    wide = found.dtype == torch.bfloat16
    # float32: how torch orders a sum of 256 products differs between machines by some 3e-6
    torch.testing.assert_close(found.float(), expected, atol=6e-3 if wide else 1e-5, rtol=8e-3 if wide else 1e-5)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One compiled file in use."""
    found = native.opened(Path(request.param))
    monkeypatch.setattr("precis.attention.ragged.library", lambda: found)
    return Path(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 96, 128, 256])
def test_every_head_size_equals_torch(level: Path, head_dim: int, dtype: torch.dtype) -> None:
    for n, group in ((1, 1), (1, 3), (5, 2), (40, 4)):
        check(case(n, head_dim, n, group, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"window": 400}, {"softcap": 2.0}, {"sinks": True}, {"bias": True}, {"causal": True}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_option_equals_torch(level: Path, options: dict[str, int | float | bool], dtype: torch.dtype) -> None:
    for n, lengths in ((1, (300, 1)), (7, (33, 7)), (120, (257, 130)), (4, (0, 9))):
        check(case(n, 64, n, lengths=lengths, dtype=dtype, **options))  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 10_000),
    head_dim=st.sampled_from([4, 16, 24, 64]),
    n=st.integers(1, 30),
    group=st.integers(1, 9),
    n_kv_heads=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 12, 500]),
    flags=st.tuples(*[st.booleans()] * 5),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.skipif(not FILES, reason="there is no compiled file")
def test_any_mixture_equals_torch(
    seed: int,
    head_dim: int,
    n: int,
    group: int,
    n_kv_heads: int,
    lengths: list[int],
    window: int | None,
    flags: tuple[bool, ...],
) -> None:
    cap, sinks, bias, causal, narrow = flags
    dtype = torch.bfloat16 if narrow else torch.float32
    made = case(
        seed,
        head_dim,
        n,
        group,
        n_kv_heads,
        tuple(lengths),
        dtype,
        window,
        2.0 if cap else None,
        sinks=sinks,
        bias=bias,
        causal=causal,
    )
    check(made)


@pytest.mark.skipif(not FILES, reason="there is no compiled file")
def test_rows_without_entries_get_zeros_and_wrong_runs_are_refused() -> None:
    made = case(0, 16, lengths=())
    nothing = ragged.attend(made.new, ragged.runs_of([]), scaling=1.0)
    assert not nothing.any()
    made = case(0, 16)
    for column, wrong in ((5, 1000), (6, -1), (4, -3), (0, 0)):
        runs = ragged.runs_of(made.segments)
        runs[0, column] = wrong
        with pytest.raises(ValueError, match="fit"):
            ragged.attend(made.new, runs, scaling=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        ragged.addresses(torch.ones(4, 6)[:, ::2], torch.ones(4, 3), torch.ones(4, dtype=torch.int32), None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3", "mistral"])
@pytest.mark.skipif(not FILES, reason="there is no compiled file")
def test_packed_steps_give_the_logits_that_torch_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached(family)
    g = model.geometry
    snapshots = []
    for seed in range(2):
        keep = torch.rand(g.n_layers, g.n_kv_heads, N_CONTEXT, generator=torch.Generator().manual_seed(seed)) < 0.4
        snapshots.append(cut(read(model, tokens(N_CONTEXT, seed)), keep))
    questions = [tokens(n, seed=20 + n).tolist() for n in (9, 300, 1)]  # one needs more room than a new tail has

    def run() -> list[Tensor]:
        sessions = [Session.on(snapshots[0]), Session.on(snapshots[0]), Session.on(snapshots[1])]
        feeds = [Feed(s, q, last=True) for s, q in zip(sessions, questions, strict=True)]
        logits = step(model, feeds)
        for _ in range(3):
            logits += step(model, [Feed(s, [int(x[-1].argmax())]) for s, x in zip(sessions, logits[-3:], strict=True)])
        assert all(np.all(s.tail.counts == len(q) + 3) for s, q in zip(sessions, questions, strict=True))
        return logits

    found = run()
    monkeypatch.setattr("precis.attention.ragged.library", lambda: None)
    for got, expected in zip(found, run(), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
