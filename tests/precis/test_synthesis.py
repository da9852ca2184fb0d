"""Entries from coefficients in C++ equal the plain matrix product, for any heads and any instruction set."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from precis import coefficients, native, synthesis
from precis.coefficients import Levels
from precis.synthesis import Target, synthesize
from precis.transform import Transform
from tests.precis.test_native import FILES

N = 40


def transform(dim: int) -> Transform:
    generator = torch.Generator().manual_seed(dim)
    size = 2 * 2 * 3 * dim
    root = torch.eye(dim) + 0.1 * torch.randn(4, 2, 3, dim, dim, generator=generator)
    tables = {
        "mean": torch.randn(4, 2, 3, dim, generator=generator),
        "root": root,
        "leading": torch.randn(2, size, 20, generator=generator),
        "axes": torch.randn(2, size, 10, generator=generator),
        "scales": torch.zeros(2, 30),
    }
    return Transform.of(tables)


def levels(n_axes: int = 21) -> Levels:
    """Tokens of many classes; escapes, in one row two."""
    draws = np.random.default_rng(3)
    symbols = np.where(draws.random((N, n_axes)) < 0.8, 128, draws.integers(1, 256, (N, n_axes))).astype(np.uint8)
    symbols[5, 2] = symbols[17, 0] = symbols[17, n_axes - 1] = 0
    symbols[7] = 128
    steps = (0.3 * 2.0 ** (draws.integers(-16, 17, N) / 2)).astype(np.float32)
    return Levels.of(symbols, np.array([4000, -70000, 129], np.int32), steps)


def kept() -> list[NDArray[np.int32]]:
    draws = np.random.default_rng(4)
    return [np.flatnonzero(draws.random(N) < share).astype(np.int32) for share in (1.1, 0.5, 0.0, 0.9, 0.1, 0.7)]


def places() -> NDArray[np.int32]:
    """Two other entries stand before each head's."""
    found, at = np.full((6, N), -1, np.int32), 2
    for own, rows in zip(found, kept(), strict=True):
        own[rows] = at + np.arange(len(rows))
        at += len(rows) + 2
    return found


def target(dim: int, dtype: torch.dtype = torch.float32, where: NDArray[np.int32] | None = None) -> Target:
    keys, values = torch.full((2, sum(map(len, kept())) + 12, dim), 7.0, dtype=dtype)
    return Target(places() if where is None else where, keys, values)


@pytest.fixture(params=["", *(path for path in FILES)], ids=lambda path: path.stem if path else "torch")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled file in use, or none."""
    found = native.opened(Path(request.param)) if request.param else None
    monkeypatch.setattr(synthesis, "library", lambda: found)
    monkeypatch.setattr(coefficients, "library", lambda: found)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [12, 16, 64, 72, 128])
def test_it_equals_the_product(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesis, "_TOKENS", 16)
    monkeypatch.setattr(synthesis, "_ROWS", 7)
    made, found = transform(dim), target(dim, dtype)
    synthesize(made, 1, levels(), found)
    expected = made.backward(1, levels().dense()).transpose(2, 3).flatten(1, 2)
    taken = torch.zeros(len(found.keys), dtype=torch.bool)
    for head, (where, own) in enumerate(zip(found.places, kept(), strict=True)):
        inside = torch.from_numpy(where[own]).long()
        taken[inside] = True
        for got, kind in ((found.keys, 0), (found.values, 1)):
            wanted = expected[torch.from_numpy(own).long(), head, kind]
            if dtype == torch.float32:
                torch.testing.assert_close(got[inside], wanted, atol=0.02, rtol=1e-5)
            else:
                off = (got[inside].float() - wanted).norm(dim=1) / wanted.norm(dim=1)
                assert not len(own) or float(off.max()) < 8 * 2**-8  # of large terms that cancel
    assert bool((found.keys[~taken] == 7).all())
    assert bool((found.values[~taken] == 7).all())


def test_float16_is_float32_rounded() -> None:
    wide, narrow = target(16), target(16, torch.float16)
    synthesize(transform(16), 0, levels(), wide)
    synthesize(transform(16), 0, levels(), narrow)
    assert torch.equal(narrow.keys, wide.keys.half())
    assert torch.equal(narrow.values, wide.values.half())


@pytest.mark.usefixtures("kernels")
def test_levels_know_their_rows() -> None:
    found = levels()
    filled = found.symbols != 128
    assert found.used.tolist() == [int(row.nonzero()[0].max(initial=-1)) + 1 for row in filled]
    assert found.n_escapes.tolist() == (found.symbols == 0).sum(1).tolist()
    with pytest.raises(ValueError, match="number of escapes"):
        Levels.of(found.symbols, found.escapes[1:], found.steps)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_fit_together_is_refused(dtype: torch.dtype) -> None:
    beyond = places()
    beyond[3, 5] = 10**6
    wrong = [
        (levels(31), target(16, dtype)),
        (levels(), target(16, dtype, places()[1:])),
        (levels(), target(16, dtype, places()[:, 1:])),
        (levels(), target(16, dtype, beyond)),
        (levels(), target(17, dtype)),
        (levels(), target(16, torch.int16)),
        (levels(), replace(target(16, dtype), keys=torch.zeros(3, 16, dtype=dtype))),
    ]
    for told, where in wrong:
        with pytest.raises(ValueError, match="do not fit together"):
            synthesize(transform(16), 0, told, where)


@pytest.mark.parametrize("name", ["rows", "place"])
def test_the_kernels_check_what_they_are_given(name: str) -> None:
    if native.library() is None:
        pytest.skip("there is no compiled file")
    told, made, pointer = levels(), transform(16), ctypes.c_void_p
    n, r = told.symbols.shape
    firsts = np.concatenate([[0], np.cumsum(told.n_escapes, dtype=np.int64)])
    order, where = np.arange(N, dtype=np.int32), places()
    bad = order.copy()
    bad[3] = N
    out, keys, values = (torch.zeros(N * 6 * 32, dtype=torch.bfloat16) for _ in range(3))

    def rows(order: NDArray[np.int32], k: int) -> int:
        parts = (told.symbols, told.escapes, firsts)
        given: list[Any] = [*(pointer(part.ctypes.data) for part in parts), n, r, pointer(order.ctypes.data), N, k]
        return int(native.library().precis_rows(*given, pointer(out.data_ptr()), 2))  # type: ignore[union-attr]

    def place(order: NDArray[np.int32], n_entries: int) -> int:
        given: list[Any] = [
            pointer(out.data_ptr()),
            pointer(made.mean.data_ptr()),
            pointer(told.steps.ctypes.data),
            pointer(order.ctypes.data),
        ]
        given += [N, N, pointer(where.ctypes.data), ctypes.c_int64(n_entries), 16, 2, 3]
        ends = [pointer(keys.data_ptr()), pointer(values.data_ptr()), 2]
        return int(native.library().precis_place(*given, *ends))  # type: ignore[union-attr]

    if name == "rows":
        assert [rows(order, r), rows(bad, r), rows(order, r + 1), rows(order, 2)] == [0, 1, 1, 1]
    else:
        last = int(where.max())
        assert [place(order, last + 1), place(bad, last + 1), place(order, last)] == [0, 1, 1]
