"""The Triton backend of packed steps: its mathematics equals the torch reference under Triton's interpreter, which
knows no bfloat16, and its kernels compile for GPUs that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precis.attention import ragged, triton_runs
from precis.engine import step
from precis.families import Model
from precis.session import Feed, Session
from precis.views import View
from precis.views.quest import QuestView
from precis.views.sage import SageView
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens
from tests.precis.test_ragged import Case, case, expected_of

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHARED_BYTES = 99 << 10  # of a block on the smallest devices that bfloat16 runs on


def check(made: Case) -> None:
    expected, (n_heads, n, head_dim), n_kv_heads = expected_of(made), made.new.query.shape, made.new.key.shape[0]
    runs, item = ragged.runs_of(made.segments), made.new.key.element_size()
    [units] = triton_runs.units_of([runs], n * n_heads // n_kv_heads, n_kv_heads, head_dim * item, DEVICE)
    found = triton_runs.attend(made.new, units, sinks=made.sinks, **made.options)  # type: ignore[arg-type]
    assert found.dtype == made.new.query.dtype
    half = found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, atol=2e-3 if half else 3e-6, rtol=2e-3 if half else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128, 256])
def test_every_head_size_equals_torch(head_dim: int, dtype: torch.dtype) -> None:
    for n, group in ((1, 3), (5, 4)):
        check(case(n, head_dim, n, group, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"window": 400}, {"softcap": 2.0}, {"sinks": True}, {"bias": True}, {"causal": True}],
    ids=lambda options: next(iter(options)),
)
def test_every_option_equals_torch(options: dict[str, int | float | bool]) -> None:
    for n, lengths in ((1, (300, 1)), (7, (33, 7)), (10, (980, 11)), (4, (0, 9))):
        check(case(n, 64, n, lengths=lengths, **options))  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.sampled_from([4, 24, 64]), st.integers(1, 9), st.integers(1, 9), st.integers(1, 2)),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 12, 500]),
    flags=st.tuples(*[st.booleans()] * 4),
)
@settings(max_examples=8, deadline=None)
def test_any_mixture_equals_torch(
    seed: int, shape: tuple[int, int, int, int], lengths: list[int], window: int | None, flags: tuple[bool, ...]
) -> None:
    cap, sinks, bias, causal = flags
    softcap = 2.0 if cap else None
    check(case(seed, *shape, tuple(lengths), torch.float32, window, softcap, sinks=sinks, bias=bias, causal=causal))


def test_units_are_bounded_sorted_and_cover_every_pair_of_row_and_entry_once() -> None:
    runs = np.array([[10_000, 20_000, 30_000, 0, 1300, 40, 35, 1], [1, 1, 0, 0, 0, 0, 3, 0], [0, 0, 0, 0, 5, 0, 3, 0]])
    [units] = triton_runs.units_of([runs], 75, 1, 8, torch.device("cpu"))
    table = units.table.numpy()
    assert (table[:, 4] <= 512).all()
    assert (table[:, 6] <= 16).all()
    assert (np.diff(table[:, 5]) >= 0).all()
    covered = np.zeros((75, 1300), int)
    for key, value, position, _, length, first, n_rows, _ in table[table[:, 0] >= 10_000]:
        start = (key - 10_000) // 8
        assert (value - 20_000, position - 30_000) == (start * 8, start * 4)
        covered[first : first + n_rows, start : start + length] += 1
    assert (covered[40:75] == 1).all()
    assert covered.sum() == 35 * 1300
    assert units.heads.tolist() == [0, len(table)]


def answers(model: Model, view: View | None) -> list[Tensor]:
    """Logits of two sessions on one snapshot and one on another, for a question each and three more steps."""
    g = model.geometry
    keep = torch.rand(g.n_layers, g.n_kv_heads, N_CONTEXT, generator=torch.Generator().manual_seed(3)) < 0.7
    snapshots = [cut(read(model, tokens(N_CONTEXT, 0)), keep), cut(read(model, tokens(N_CONTEXT, 1)))]
    sessions = [Session.on(snapshots[0], view), Session.on(snapshots[0]), Session.on(snapshots[1], view)]
    questions = [tokens(n, seed=20 + n).tolist() for n in (9, 3, 1)]
    logits = step(model, [Feed(s, q, last=True) for s, q in zip(sessions, questions, strict=True)])
    for _ in range(3):
        logits += step(model, [Feed(s, [int(x[-1].argmax())]) for s, x in zip(sessions, logits[-3:], strict=True)])
    assert all(np.all(s.tail.counts == len(q) + 3) for s, q in zip(sessions, questions, strict=True))
    return logits


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/precis/test_gpu.py does this on a GPU")
@pytest.mark.parametrize(
    ("family", "view"),
    [
        ("llama", None),
        ("llama", SageView(budget=40)),
        ("llama", QuestView(budget=64, dense_layers=1)),
        ("gemma2", None),
        ("gpt_oss", None),
        ("mistral-window", None),
    ],
)
def test_packed_steps_give_the_logits_that_torch_gives(
    family: str, view: View | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attached(family)
    monkeypatch.setattr("precis.attention.ragged.library", lambda: None)
    expected = answers(model, view)
    monkeypatch.setattr("precis.attention.triton_runs.usable", lambda like: True)
    through, n_calls = triton_runs.attend, 0

    def counting(*args: Any, **options: Any) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        return through(*args, **options)

    monkeypatch.setattr("precis.attention.triton_runs.attend", counting)
    for got, wanted in zip(answers(model, view), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    assert n_calls == 4 * model.geometry.n_layers


_COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from precis.attention import kernels
from precis.attention.triton_runs import block_of

def compiled(fn, pointers, constants, level):
    floats = ("scaling", "softcap")
    kind = lambda name: pointers.get(name, "fp32" if name in floats else "i32")
    types = {name: "constexpr" if name in constants else kind(name) for name in fn.arg_names}
    values = {(fn.arg_names.index(n),): v for n, v in constants.items()}
    made = triton.compile(ASTSource(fn=fn, signature=types, constexprs=values), target=GPUTarget("cuda", level, 32))
    print(fn.__name__, level, made.metadata.shared, len(made.asm["cubin"]))

for name, size, head_dim in (("bf16", 2, 64), ("bf16", 2, 256), ("fp16", 2, 80), ("fp32", 4, 64), ("fp32", 4, 256)):
    width = 1 << (head_dim - 1).bit_length()
    sizes = {"D": head_dim, "WIDTH": width}
    part = {"sums": "*fp32", "tops": "*fp32", "totals": "*fp32", "units": "*i64"}
    mine, rows = "*" + name, {"ROWS": 16}
    for level in (80, 90):
        types = {"query": mine, "row_positions": "*i32", **part}
        compiled(kernels.read, types, {**sizes, **rows, "BLOCK": block_of(width, size)}, level)
    types = {"heads": "*i32", "sinks": "*fp32", "out": mine, **part}
    compiled(kernels.merge, types, {**sizes, **rows, "HAS_SINKS": head_dim == 64}, 90)
    compiled(kernels.place, {"key": mine, "value": mine, "positions": "*i32", "places": "*i64"}, sizes, 90)
"""


def test_kernels_compile_for_gpus_and_fit_their_shared_memory(tmp_path: Path) -> None:
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 20
    assert all(int(shared) <= SHARED_BYTES and int(size) > 0 for _, _, shared, size in lines), done.stdout
