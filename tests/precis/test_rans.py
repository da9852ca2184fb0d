"""The entropy coder: an exact inverse, near the entropy, the same bytes from C++ and numpy, and no damage unnoticed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precis import native, rans
from precis.rans import LANES, TOTAL, Bytes, decode, encode, frequencies
from tests.precis.test_native import FILES

WAYS = [None, *FILES]


@pytest.fixture(params=WAYS, ids=lambda path: path.stem if path else "numpy")
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    """Every compiled file, and numpy alone."""
    found = native.opened(Path(request.param)) if request.param else None
    monkeypatch.setattr(rans, "library", lambda: found)
    return found


def counted(symbols: Bytes, contexts: Bytes, n_contexts: int) -> np.ndarray:
    counts = np.zeros((n_contexts, 256), np.int64)
    np.add.at(counts, (contexts, symbols), 1)
    return counts


def drawn(n: int, n_contexts: int = 5, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Symbols around 128, wider in higher contexts."""
    generator = np.random.default_rng(seed)
    contexts = generator.integers(0, n_contexts, n).astype(np.uint8)
    spread = 0.2 * 2.0 ** (1.5 * contexts)
    return np.clip(np.rint(generator.laplace(128, spread)), 0, 255).astype(np.uint8), contexts


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 1000, 40_001])
def test_what_is_decoded_is_what_was_encoded(way: ctypes.CDLL | None, n: int) -> None:
    symbols, contexts = drawn(n)
    tables = frequencies(counted(symbols, contexts, 5))
    data = encode(symbols, contexts, tables)
    assert (decode(data, contexts, tables) == symbols).all()


def test_every_backend_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols, contexts = drawn(10_007)
    tables = frequencies(counted(symbols, contexts, 5))
    made = []
    for path in WAYS:
        monkeypatch.setattr(rans, "library", lambda path=path: native.opened(path) if path else None)
        made.append(encode(symbols, contexts, tables))
    assert len(set(made)) == 1


def test_the_size_is_the_entropy_and_the_states() -> None:
    symbols, contexts = drawn(200_000)
    counts = counted(symbols, contexts, 5)
    share = counts[contexts, symbols] / counts.sum(1)[contexts]
    entropy = -np.log2(share).sum() / 8
    size = len(encode(symbols, contexts, frequencies(counts)))
    assert entropy < size < 1.003 * entropy + 4 * LANES


def test_tables_sum_to_4096_and_have_room_for_every_symbol() -> None:
    counts = np.zeros((4, 256), np.int64)
    counts[0, 7] = 10**9  # an only symbol
    counts[1] = 1
    counts[2, :3] = (10**12, 1, 1)  # shares far below one of 4096
    tables = frequencies(counts)
    assert (tables.sum(1, dtype=np.int64) == TOTAL).all()
    assert tables.max() < TOTAL
    assert (tables[counts > 0] > 0).all()


def test_a_symbol_without_a_frequency_is_refused(way: ctypes.CDLL | None) -> None:
    symbols, contexts = np.array([3, 9], np.uint8), np.zeros(2, np.uint8)
    tables = frequencies(counted(symbols[:1], contexts[:1], 1))
    with pytest.raises(ValueError, match="frequency"):
        encode(symbols, contexts, tables)


def test_what_does_not_fit_together_is_refused(way: ctypes.CDLL | None) -> None:
    symbols, contexts = drawn(100)
    tables = frequencies(counted(symbols, contexts, 5))
    wrongs: list[Any] = [tables[:3], tables // 2, tables.astype(np.int64), tables[:, :100]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="fit"):
            encode(symbols, contexts, wrong)
        with pytest.raises(ValueError, match="fit"):
            decode(bytes(1000), contexts, wrong)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_found_or_harmless_but_never_runs_away(data: st.DataObject) -> None:
    symbols, contexts = drawn(data.draw(st.integers(0, 3000)), seed=data.draw(st.integers(0, 9)))
    tables = frequencies(counted(symbols, contexts, 5))
    good = encode(symbols, contexts, tables)
    at = data.draw(st.integers(0, len(good)))
    bad = data.draw(st.sampled_from([good[:at], good + b"\0\0", good[:at] + b"\xff" + good[at + 1 :], good[at:]]))
    for path in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rans, "library", lambda path=path: native.opened(path) if path else None)
            try:
                found = decode(bad, contexts, tables)
            except ValueError:
                continue
            assert found.shape == symbols.shape
            assert bad == good or not (found == symbols).all()


def test_streams_of_all_zero_bytes_and_of_noise_end_in_an_error(way: ctypes.CDLL | None) -> None:
    symbols, contexts = drawn(5000)
    tables = frequencies(counted(symbols, contexts, 5))
    noise = np.random.default_rng(1).bytes(4000)
    for bad in (b"", bytes(127), bytes(128), bytes(5000), noise, noise[:-1]):
        with pytest.raises(ValueError, match="damaged"):
            decode(bad, contexts, tables)
