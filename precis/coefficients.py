"""Coefficients of a transform <-> few bytes: quantised, then entropy-coded with a context per number (`precis.rans`).

See `precis.rows` for how numbers are rounded. Tables are counted over the whole snapshot.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis import rans
from precis.native import library
from precis.rows import MAX_CLASS, MAX_GAIN, N_CONTEXTS, Rows, contexts_of, half_octaves, quantise

_ZERO, _ESCAPE = 128, 0
_LIMIT = 127  # of |symbol - _ZERO|; beyond it a number is stored apart
_OF_CLASSES, _OF_GAINS = N_CONTEXTS, N_CONTEXTS + 1  # tables beside those of the contexts
_N_TABLES = N_CONTEXTS + 2
_TABLE_BYTES = 2 * rans.N_SYMBOLS * _N_TABLES
_HEAD = struct.Struct("<IIIII")  # axes, bytes of classes, of gains and of symbols, escapes


@dataclass(frozen=True, slots=True)
class Coded:
    """What is stored: tables of the whole, and a stream per block."""

    tables: bytes
    blocks: tuple[bytes, ...]

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return len(self.tables) + sum(map(len, self.blocks))


@dataclass(frozen=True, slots=True)
class Levels:
    """The quantised coefficients of a block.

    Attributes:
        symbols: [n, r'] uint8, r' <= r: 128 is 0; 0 stands for the next escape.
        escapes: int32, levels that no symbol has.
        steps: [n] float32, the step of each row.
        used: [n] int32, columns up to the last that is not 0.
        n_escapes: [n] int32, of each row.
    """

    symbols: rans.Bytes
    escapes: NDArray[np.int32]
    steps: NDArray[np.float32]
    used: NDArray[np.int32]
    n_escapes: NDArray[np.int32]

    @staticmethod
    def of(symbols: rans.Bytes, escapes: NDArray[np.int32], steps: NDArray[np.float32]) -> Levels:
        """With what `symbols` tell.

        Raises:
            ValueError: if there is another number of escapes than they ask for.
        """
        symbols = np.ascontiguousarray(symbols)
        used, n_escapes = _scanned(symbols)
        if int(n_escapes.sum()) != len(escapes) or len(steps) != len(symbols):
            raise ValueError("a block has another number of escapes than it says")
        return Levels(symbols, escapes, steps, used, n_escapes)

    def whole(self) -> Tensor:
        """[n, r'] float32, coefficients in units of their rows' steps."""
        levels = torch.from_numpy(self.symbols.astype(np.float32)).sub_(_ZERO)
        levels[torch.from_numpy(self.symbols == _ESCAPE)] = torch.from_numpy(self.escapes.astype(np.float32))
        return levels

    def dense(self) -> Tensor:
        """Coefficients [n, r'] float32."""
        return self.whole() * torch.from_numpy(self.steps)[:, None]


def encode(blocks: Sequence[Rows], step: float) -> Coded:
    """Quantise and code.

    Args:
        blocks: of one snapshot.
        step: of class 0, above 0.

    Raises:
        ValueError: if a coefficient is not finite, or beyond 2^24 steps.
    """
    counts = np.zeros((_N_TABLES, rans.N_SYMBOLS), np.int64)
    parts: list[tuple[int, NDArray[Any], list[tuple[rans.Bytes, rans.Bytes]]]] = []
    for rows in blocks:
        levels, contexts, gains = quantise(rows, step)
        symbols, escapes = _symbols(levels)
        classes = (rows.classes.cpu().numpy() + MAX_CLASS).astype(np.uint8)
        coded: list[tuple[rans.Bytes, rans.Bytes]] = [
            (classes, _same(len(classes), _OF_CLASSES)),
            ((gains + MAX_GAIN).astype(np.uint8), _same(len(gains), _OF_GAINS)),
            (symbols, contexts),
        ]
        for found, own in coded:
            counts += _counted(found, own)
        parts.append((levels.shape[1], escapes, coded))
    tables = rans.frequencies(counts)
    streams = []
    for n_axes, escapes, coded in parts:
        made = [rans.encode(found, own, tables) for found, own in coded]
        head = _HEAD.pack(n_axes, *map(len, made), len(escapes))
        streams.append(head + b"".join(made) + escapes.tobytes())
    head = struct.pack("<f", step)
    return Coded(head + zlib.compress(tables.astype("<u2").tobytes(), 9), tuple(streams))


def decode(step: float, tables: NDArray[np.uint16], stream: bytes, n: int, scales: Tensor) -> Levels:
    """The first coefficients of a block; the others are 0.

    Args:
        step: from `read_tables`.
        tables: from `read_tables`.
        stream: of the block.
        n: rows of the block.
        scales: [r] of the block, from the transform.

    Raises:
        ValueError: if a byte cannot be right.
    """
    if len(stream) < _HEAD.size:
        raise ValueError("a block ends early")
    n_axes, *sizes, n_escapes = _HEAD.unpack_from(stream)
    if n_axes > len(scales) or len(stream) != _HEAD.size + sum(sizes) + 4 * n_escapes:
        raise ValueError("a block has another length than it says")
    ends = np.cumsum([_HEAD.size, *sizes]).tolist()
    pieces = [stream[start:stop] for start, stop in pairwise(ends)]
    classes = _of_tokens(pieces[0], n, tables, _OF_CLASSES, MAX_CLASS)
    gains = _of_tokens(pieces[1], n, tables, _OF_GAINS, MAX_GAIN)
    contexts = contexts_of(classes + gains, scales[:n_axes], half_octaves(step))
    symbols = rans.decode(pieces[2], contexts.reshape(-1), tables)
    escapes = np.frombuffer(stream, "<i4", n_escapes, ends[-1]).astype(np.int32)
    steps = (step * torch.exp2(torch.from_numpy(classes).float() / -2)).numpy()
    return Levels.of(symbols.reshape(n, n_axes), escapes, steps)


def read_tables(data: bytes) -> tuple[float, NDArray[np.uint16]]:
    """The step and the frequencies.

    Raises:
        ValueError: if they cannot be right.
    """
    try:
        (step,) = struct.unpack_from("<f", data)
        raw = zlib.decompressobj()
        plain = raw.decompress(data[4:], _TABLE_BYTES + 1)
    except (struct.error, zlib.error) as error:
        raise ValueError("the tables cannot be read") from error
    if len(plain) != _TABLE_BYTES or not raw.eof or raw.unused_data or not 0 < step < float("inf"):
        raise ValueError("the tables have a wrong length or step")
    return step, np.frombuffer(plain, "<u2").reshape(_N_TABLES, rans.N_SYMBOLS).astype(np.uint16)


def estimated_bytes(blocks: Sequence[Rows], step: float) -> float:
    """About what `encode` would give, from entropies alone."""
    counts, n_escapes = np.zeros((_N_TABLES, rans.N_SYMBOLS), np.int64), 0
    for rows in blocks:
        levels, contexts, _ = quantise(rows, step)
        symbols, escapes = _symbols(levels)
        counts += _counted(symbols, contexts)
        n_escapes += len(escapes)
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    return float(-(counts * np.log2(share, where=counts > 0, out=np.zeros_like(share))).sum() / 8 + 4 * n_escapes)


def _symbols(levels: Tensor) -> tuple[rans.Bytes, NDArray[np.int32]]:
    flat = levels.reshape(-1).to(torch.int32).cpu().numpy()
    beyond = np.abs(flat) > _LIMIT
    symbols = np.where(beyond, _ESCAPE, flat + _ZERO).astype(np.uint8)
    return symbols, flat[beyond].astype("<i4")


def _scanned(symbols: rans.Bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row, columns up to the last that is not 0, and escapes."""
    n, r = symbols.shape
    if library() is None:
        places = np.where(symbols == _ZERO, 0, np.arange(1, r + 1, dtype=np.int32))
        return places.max(1, initial=0).astype(np.int32), (symbols == _ESCAPE).sum(1).astype(np.int32)
    used, n_escapes = np.empty((2, n), np.int32)
    library().precis_scan(  # type: ignore[union-attr]
        ctypes.c_void_p(symbols.ctypes.data),
        *map(ctypes.c_int, (n, r)),
        *(ctypes.c_void_p(part.ctypes.data) for part in (used, n_escapes)),
    )
    return used, n_escapes


def _of_tokens(piece: bytes, n: int, tables: NDArray[np.uint16], context: int, most: int) -> NDArray[np.int64]:
    """A number per token, -most to most."""
    found = rans.decode(piece, _same(n, context), tables).astype(np.int64) - most
    if n and int(found.max()) > most:
        raise ValueError("a token has no such class or gain")
    return found


def _same(n: int, context: int) -> rans.Bytes:
    return np.full(n, context, np.uint8)


def _counted(symbols: rans.Bytes, contexts: rans.Bytes) -> NDArray[np.int64]:
    flat = contexts.astype(np.int64) * rans.N_SYMBOLS + symbols
    return np.bincount(flat, minlength=_N_TABLES * rans.N_SYMBOLS).reshape(_N_TABLES, rans.N_SYMBOLS)
