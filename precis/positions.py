"""Positions of one head's kept entries as few bytes: a run, a bitmap, or gaps, whichever is smallest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]
RUN, BITMAP, GAPS = 0, 1, 2  # one mode byte per head


def encode(positions: Positions, n_tokens: int) -> tuple[int, bytes]:
    """Ascending positions in [0, n_tokens) -> mode, bytes."""
    count = len(positions)
    if count == 0 or int(positions[-1]) - int(positions[0]) == count - 1:
        start = int(positions[0]) if count else 0
        return RUN, start.to_bytes(4, "little")
    gaps = np.diff(positions, prepend=0)
    if 2 * count < (n_tokens + 7) // 8 and int(gaps.max()) < 65536:
        return GAPS, gaps.astype("<u2").tobytes()
    flags = np.zeros(n_tokens, dtype=bool)
    flags[positions] = True
    return BITMAP, np.packbits(flags, bitorder="little").tobytes()


def size(mode: int, count: int, n_tokens: int) -> int:
    """Bytes that `count` positions take in a mode.

    Raises:
        ValueError: if there is no such mode.
    """
    sizes = {RUN: 4, BITMAP: (n_tokens + 7) // 8, GAPS: 2 * count}
    if mode not in sizes:
        raise ValueError(f"no position mode {mode}")
    return sizes[mode]


def decode(mode: int, data: bytes, count: int, n_tokens: int) -> Positions:
    """The inverse of `encode`, checking every claim.

    Raises:
        ValueError: if the bytes do not give `count` ascending positions in [0, n_tokens).
    """
    if mode == RUN:
        start = int.from_bytes(data, "little")
        found = np.arange(start, start + count, dtype=np.int64)
    elif mode == GAPS:
        found = np.cumsum(np.frombuffer(data, "<u2").astype(np.int64))
    else:
        found = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))
    if len(found) != count or (count and (int(found[-1]) >= n_tokens or bool((np.diff(found) <= 0).any()))):
        raise ValueError("positions are not ascending inside the context")
    return found.astype(np.int32)
