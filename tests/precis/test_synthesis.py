"""Entries from coefficients in C++ equal the plain matrix product, for any heads and any instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from precis import native, synthesis
from precis.coefficients import Levels
from precis.synthesis import Rows, synthesize
from precis.transform import Transform

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
    draws = np.random.default_rng(3)
    symbols = np.where(draws.random((N, n_axes)) < 0.8, 128, draws.integers(1, 256, (N, n_axes))).astype(np.uint8)
    symbols[5, 2] = symbols[17, n_axes - 1] = 0
    return Levels(symbols, np.array([4000, -70000], np.int32), draws.random(N).astype(np.float32))


def kept() -> Rows:
    draws = np.random.default_rng(4)
    return [np.flatnonzero(draws.random(N) < share).astype(np.int32) for share in (1.1, 0.5, 0.0, 0.9, 0.1, 0.7)]


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("dim", [12, 16, 64, 72, 128])
def test_it_equals_the_product(dim: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.file_of(level)
    if not path.exists() or (level and level not in supported()):
        pytest.skip("this instruction set is not here")
    library = native.opened(path)
    monkeypatch.setattr(synthesis, "library", lambda: library)
    made, rows = transform(dim), kept()
    starts = np.cumsum([2] + [len(own) + 2 for own in rows])[:-1].tolist()  # two others before each head's
    keys, values = torch.full((2, sum(map(len, rows)) + 12, dim), 7.0)
    synthesize(made, 1, levels(), rows, starts, keys, values)
    expected = made.backward(1, levels().dense()).transpose(2, 3).flatten(1, 2)
    taken = torch.zeros(len(keys), dtype=torch.bool)
    for head, (start, own) in enumerate(zip(starts, rows, strict=True)):
        taken[start : start + len(own)] = True
        for found, kind in ((keys, 0), (values, 1)):
            wanted = expected[torch.from_numpy(own).long(), head, kind]
            torch.testing.assert_close(found[start : start + len(own)], wanted, atol=0.02, rtol=1e-5)
    assert bool((keys[~taken] == 7).all())
    assert bool((values[~taken] == 7).all())


def supported() -> tuple[str, ...]:
    return {"AVX512": native.LEVELS, "AVX2": native.LEVELS[1:]}.get(torch.backends.cpu.get_cpu_capability(), ("",))


def test_what_does_not_fit_together_is_refused() -> None:
    if native.library() is None:
        pytest.skip("there is no compiled file")
    made, rows = transform(16), kept()
    starts = np.cumsum([0] + [len(own) for own in rows])[:-1].tolist()
    keys, values = torch.zeros(2, sum(map(len, rows)), 16)
    few = Levels(levels().symbols, np.zeros(1, np.int32), levels().steps)
    for wrong, own, given in ((few, rows, starts), (levels(31), rows, starts), (levels(), rows[1:], starts[1:])):
        with pytest.raises(ValueError, match="do not fit together"):
            synthesize(made, 0, wrong, own, given, keys, values)
    for place, start in ((1, starts[1] + 10**6), (0, -1)):
        with pytest.raises(ValueError, match="do not fit together"):
            synthesize(made, 0, levels(), rows, [*starts[:place], start, *starts[place + 1 :]], keys, values)
    beyond = [np.array([N], np.int32), *rows[1:]]
    with pytest.raises(ValueError, match="do not fit together"):
        synthesize(made, 0, levels(), beyond, starts, keys, values)
