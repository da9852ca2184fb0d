"""Coefficients of a transform <-> few bytes: one step for everything, a finer one for tokens that matter, rANS.

A token of class k is quantised with step / 2^k, in all blocks' coefficients alike; a dead zone rounds towards 0. The
context of a symbol is its expected size: the coefficient's scale and the token's class, in half octaves of the step.
Both are integers, so that every machine finds the same contexts. Tables are counted over the whole snapshot.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis import rans
from precis.native import library

MAX_CLASS = 8
DEAD_ZONE = 0.12
_CONTEXTS, _MIDDLE = 40, 12  # half octaves; a coefficient as large as the step is in the middle one
_ZERO, _ESCAPE = 128, 0
_LARGEST = 2.0**24  # of whole numbers that float32 tells apart
_LIMIT = 127  # of |symbol - _ZERO|; beyond it a number is stored apart
_TABLE_BYTES = 2 * rans.N_SYMBOLS * (_CONTEXTS + 1)
_HEAD = struct.Struct("<IIII")  # axes, bytes of classes, bytes of symbols, escapes


@dataclass(frozen=True, slots=True)
class Rows:
    """The coefficients of a block.

    Attributes:
        coefficients: [n, r] float32.
        classes: [n] int, -8 to 8: the binary logarithm of how much finer than the step a token is quantised.
        scales: [r] int8, from the transform.
    """

    coefficients: Tensor
    classes: Tensor
    scales: Tensor


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
        steps: [n] float32, the step of each row: `step` times a power of two.
        step: of class 0.
        used: [n] int32, columns up to the last that is not 0.
        n_escapes: [n] int32, of each row.
    """

    symbols: rans.Bytes
    escapes: NDArray[np.int32]
    steps: NDArray[np.float32]
    step: float
    used: NDArray[np.int32]
    n_escapes: NDArray[np.int32]

    @staticmethod
    def of(symbols: rans.Bytes, escapes: NDArray[np.int32], steps: NDArray[np.float32], step: float) -> Levels:
        """With what `symbols` tell.

        Raises:
            ValueError: if there is another number of escapes than they ask for.
        """
        symbols = np.ascontiguousarray(symbols)
        used, n_escapes = _scanned(symbols)
        if int(n_escapes.sum()) != len(escapes) or len(steps) != len(symbols):
            raise ValueError("a block has another number of escapes than it says")
        return Levels(symbols, escapes, steps, step, used, n_escapes)

    def dense(self, scale: float = 1.0) -> Tensor:
        """Coefficients [n, r'] float32, times `scale`."""
        levels = torch.from_numpy(self.symbols.astype(np.float32)).sub_(_ZERO)
        levels[torch.from_numpy(self.symbols == _ESCAPE)] = torch.from_numpy(self.escapes.astype(np.float32))
        return levels * torch.from_numpy(self.steps * np.float32(scale))[:, None]


def encode(blocks: Sequence[Rows], step: float) -> Coded:
    """Quantise and code.

    Args:
        blocks: of one snapshot.
        step: of class 0, above 0.

    Raises:
        ValueError: if a coefficient is not finite, or beyond 2^24 steps.
    """
    shift = _half_octaves(step)
    quantised = [_quantise(rows, step) for rows in blocks]
    counts = np.zeros((_CONTEXTS + 1, rans.N_SYMBOLS), np.int64)
    parts: list[tuple[NDArray[Any], ...]] = []
    for rows, levels in zip(blocks, quantised, strict=True):
        symbols, escapes = _symbols(levels)
        contexts = _contexts(rows.classes, rows.scales[: levels.shape[1]], shift)
        classes = (rows.classes.cpu().numpy() + MAX_CLASS).astype(np.uint8)
        counts[:_CONTEXTS] += _counted(symbols, contexts)
        counts[_CONTEXTS] += np.bincount(classes, minlength=rans.N_SYMBOLS)
        parts.append((symbols, contexts, escapes, classes))
    tables = rans.frequencies(counts)
    streams = []
    for levels, (symbols, contexts, escapes, classes) in zip(quantised, parts, strict=True):
        of_classes = rans.encode(classes, np.full(len(classes), _CONTEXTS, np.uint8), tables)
        of_symbols = rans.encode(symbols, contexts, tables)
        head = _HEAD.pack(levels.shape[1], len(of_classes), len(of_symbols), len(escapes))
        streams.append(head + of_classes + of_symbols + escapes.tobytes())
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
    n_axes, n_classes, n_symbols, n_escapes = _HEAD.unpack_from(stream)
    if n_axes > len(scales) or len(stream) != _HEAD.size + n_classes + n_symbols + 4 * n_escapes:
        raise ValueError("a block has another length than it says")
    at = _HEAD.size
    classes = rans.decode(stream[at : at + n_classes], np.full(n, _CONTEXTS, np.uint8), tables)
    at += n_classes
    if n and int(classes.max()) > 2 * MAX_CLASS:
        raise ValueError("a token has no such class")
    of_tokens = torch.from_numpy(classes.astype(np.int64)) - MAX_CLASS
    steps = (step * torch.exp2(-of_tokens.float())).numpy()
    contexts = _contexts(of_tokens, scales[:n_axes], _half_octaves(step))
    symbols = rans.decode(stream[at : at + n_symbols], contexts, tables)
    escapes = np.frombuffer(stream, "<i4", n_escapes, at + n_symbols).astype(np.int32)
    return Levels.of(symbols.reshape(n, n_axes), escapes, steps, step)


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
    return step, np.frombuffer(plain, "<u2").reshape(_CONTEXTS + 1, rans.N_SYMBOLS).astype(np.uint16)


def estimated_bytes(blocks: Sequence[Rows], step: float) -> float:
    """About what `encode` would give, from entropies alone."""
    shift, counts, n_escapes = _half_octaves(step), np.zeros((_CONTEXTS, rans.N_SYMBOLS), np.int64), 0
    for rows in blocks:
        levels = _quantise(rows, step)
        symbols, escapes = _symbols(levels)
        counts += _counted(symbols, _contexts(rows.classes, rows.scales[: levels.shape[1]], shift))
        n_escapes += len(escapes)
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    return float(-(counts * np.log2(share, where=counts > 0, out=np.zeros_like(share))).sum() / 8 + 4 * n_escapes)


def _half_octaves(step: float) -> int:
    """Twice the step's binary logarithm, from its bits: the same on every machine."""
    mantissa, exponent = np.frexp(np.float32(step))
    return 2 * int(exponent) - (1 if float(mantissa) < 0.75 else 0)


def _quantise(rows: Rows, step: float) -> Tensor:
    """[n, r'] whole numbers in float32; columns after the last that is not all 0 are left out."""
    scaled = rows.coefficients * (torch.exp2(rows.classes.float()) / step)[:, None]
    if not bool((scaled.abs() < _LARGEST).all()):  # not a number fails, too
        raise ValueError("a coefficient is not finite, or too large for the step")
    levels = scaled.sign() * (scaled.abs() + (0.5 - DEAD_ZONE)).floor()
    used = levels.any(0).nonzero()
    return levels[:, : int(used[-1]) + 1 if len(used) else 0]


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


def _contexts(classes: Tensor, scales: Tensor, shift: int) -> rans.Bytes:
    """[n * r'] contexts, by rows."""
    sizes = scales.cpu().numpy().astype(np.int64) - shift + _MIDDLE
    every = sizes[None] + 2 * np.arange(-MAX_CLASS, MAX_CLASS + 1)[:, None]
    of_class: rans.Bytes = np.clip(every, 0, _CONTEXTS - 1).astype(np.uint8)
    found: rans.Bytes = of_class[classes.cpu().numpy() + MAX_CLASS]
    return found.reshape(-1)


def _counted(symbols: rans.Bytes, contexts: rans.Bytes) -> NDArray[np.int64]:
    flat = contexts.astype(np.int64) * rans.N_SYMBOLS + symbols
    return np.bincount(flat, minlength=_CONTEXTS * rans.N_SYMBOLS).reshape(_CONTEXTS, rans.N_SYMBOLS)
