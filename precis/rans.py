"""Entropy coding with static tables: interleaved rANS, 32 lanes, 12-bit probabilities, one table per context.

Duda 2013, "Asymmetric numeral systems", arXiv:1311.2540; lanes as in Giesen 2014, "Interleaved entropy coders",
arXiv:1402.3392. The C++ kernel (`precis/native/rans.cpp`) and the numpy code below write and read the same bytes.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from precis.native import library

Bytes = NDArray[np.uint8]
N_SYMBOLS, TOTAL, LANES = 256, 4096, 32
_BITS, _LOW = 12, 1 << 16
_NO_MEMORY, _DAMAGED = 2, 3


def frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Tables for `encode`: [contexts, 256] counts -> frequencies that sum to 4096, above 0 where a symbol was counted.

    A context whose symbol is always the same gives one of 4096 to another, since a frequency is 12 bits wide.
    """
    found = np.zeros(counts.shape, np.int64)
    for row, count in zip(found, counts, strict=True):
        used = np.flatnonzero(count)
        if len(used) < 2:
            only = int(used[0]) if len(used) else 0
            row[only], row[(only + 1) % N_SYMBOLS] = TOTAL - 1, 1
            continue
        share = count[used] * (TOTAL - len(used)) / count[used].sum()
        row[used] = 1 + np.floor(share).astype(np.int64)
        missing = TOTAL - int(row.sum())
        most = used[np.argsort(share - np.floor(share), kind="stable")[::-1][:missing]]
        row[most] += 1
    return found.astype(np.uint16)


def encode(symbols: Bytes, contexts: Bytes, tables: NDArray[np.uint16]) -> bytes:
    """Code n symbols, each by its context's table.

    Args:
        symbols: [n].
        contexts: [n], rows of `tables`.
        tables: [contexts, 256], from `frequencies`.

    Raises:
        ValueError: if a table does not fit, or has no room for a symbol.
    """
    symbols, contexts = np.ascontiguousarray(symbols), np.ascontiguousarray(contexts)
    tables = np.ascontiguousarray(tables)
    _check(symbols, contexts, tables)
    if library() is None:
        return _encode(symbols, contexts, tables)
    out = np.empty(2 * len(symbols) + 4 * LANES + 64, np.uint8)
    size = library().precis_rans_encode(  # type: ignore[union-attr]
        *(part.ctypes.data_as(ctypes.c_void_p) for part in (symbols, contexts)),
        ctypes.c_size_t(len(symbols)),
        tables.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int(len(tables)),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(len(out)),
    )
    if size < 0:
        raise ValueError("a symbol has no frequency, or a table does not sum to 4096")
    return out[len(out) - size :].tobytes()


def decode(data: bytes, contexts: Bytes, tables: NDArray[np.uint16]) -> Bytes:
    """The symbols [n] that `encode` was given.

    Raises:
        ValueError: if the bytes are not what `encode` gives for these contexts and tables.
    """
    contexts, tables = np.ascontiguousarray(contexts), np.ascontiguousarray(tables)
    symbols = np.empty(len(contexts), np.uint8)
    _check(symbols, contexts, tables)
    if library() is None:
        return _decode(data, contexts, tables)
    stream = np.frombuffer(data, np.uint8)
    failed = library().precis_rans_decode(  # type: ignore[union-attr]
        stream.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(len(stream)),
        contexts.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(len(contexts)),
        tables.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int(len(tables)),
        symbols.ctypes.data_as(ctypes.c_void_p),
    )
    if failed == _NO_MEMORY:
        raise MemoryError("there is no memory for the tables of an entropy coder")
    if failed:
        raise ValueError("a coded stream is damaged" if failed == _DAMAGED else "tables and contexts do not fit")
    return symbols


def _check(symbols: Bytes, contexts: Bytes, tables: NDArray[np.uint16]) -> None:
    fits = (
        symbols.dtype == contexts.dtype == np.uint8
        and tables.dtype == np.uint16
        and symbols.shape == contexts.shape == (len(symbols),)
        and tables.shape == (len(tables), N_SYMBOLS)
        and bool((tables.sum(1, dtype=np.int64) == TOTAL).all())
        and int(tables.max(initial=0)) < TOTAL
        and int(contexts.max(initial=0)) < max(1, len(tables))
    )
    if not fits:
        raise ValueError("symbols, contexts and tables do not fit together")


def _encode(symbols: Bytes, contexts: Bytes, tables: NDArray[np.uint16]) -> bytes:
    firsts = np.cumsum(tables, 1, dtype=np.int64) - tables
    of_symbol, first = tables[contexts, symbols].astype(np.int64), firsts[contexts, symbols]
    if not of_symbol.all():
        raise ValueError("a symbol has no frequency")
    states = np.full(LANES, _LOW, np.int64)
    rows: list[NDArray[np.uint16]] = []
    for start in range((len(symbols) - 1) // LANES * LANES, -1, -LANES):
        f, c = of_symbol[start : start + LANES], first[start : start + LANES]
        state = states[: len(f)]
        full = state >= f << (32 - _BITS)
        rows.append(state[full].astype("<u2"))
        state = np.where(full, state >> 16, state)
        states[: len(f)] = (state // f << _BITS) + state % f + c
    return states.astype("<u4").tobytes() + b"".join(row.tobytes() for row in reversed(rows))


def _decode(data: bytes, contexts: Bytes, tables: NDArray[np.uint16]) -> Bytes:
    if len(data) < 4 * LANES or len(data) % 2:
        raise ValueError("a coded stream is damaged")
    rows = tables.astype(np.int64)
    symbol_of = np.stack([np.repeat(np.arange(N_SYMBOLS), row) for row in rows]).astype(np.uint8)
    firsts = np.cumsum(rows, 1) - rows
    states = np.frombuffer(data, "<u4", LANES).astype(np.int64)
    words = np.frombuffer(data, "<u2", offset=4 * LANES).astype(np.int64)
    symbols, at = np.empty(len(contexts), np.uint8), 0
    for start in range(0, len(contexts), LANES):
        context = contexts[start : start + LANES]
        state = states[: len(context)]
        slot = state & (TOTAL - 1)
        symbol = symbol_of[context, slot]
        state = rows[context, symbol] * (state >> _BITS) + slot - firsts[context, symbol]
        empty = np.flatnonzero(state < _LOW)
        if at + len(empty) > len(words):
            raise ValueError("a coded stream is damaged")
        state[empty] = state[empty] << 16 | words[at : at + len(empty)]
        at += len(empty)
        symbols[start : start + LANES], states[: len(context)] = symbol, state
    if at != len(words) or bool((states != _LOW).any()):
        raise ValueError("a coded stream is damaged")
    return symbols
