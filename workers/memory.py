"""Memory on the CPU that stays with the worker: memory that is new to a process is had slowly.

On a virtual machine the first touch of 160 MB can take as long as decoding a snapshot into it: 170 ms of 300, measured.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 1 << 12
_ARENAS, _MAPPED_FROM, _TRIMMED_FROM = -8, -3, -1  # names of mallopt
_LARGEST, _READY = 32 << 20, 4
_TOUCHED = 256 << 20  # bytes that are made ready at once


def keep_freed() -> None:
    """Let freed buffers of up to 32 MB be used again instead of being returned, and have some ready; GNU libc only."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for option, value in ((_ARENAS, 1), (_MAPPED_FROM, _LARGEST), (_TRIMMED_FROM, 1 << 28)):
        mallopt(option, value)
    held = [np.zeros(_LARGEST - _ALIGN, np.uint8) for _ in range(_READY)]
    for part in held:
        part.fill(1)


class Arena:
    """One region of memory that is lent in pieces, and comes back when the tensors over a piece are gone."""

    def __init__(self, n_bytes: int, touched: int = _TOUCHED) -> None:
        size = max(_ALIGN, n_bytes // _ALIGN * _ALIGN)
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(region, np.uint8)
        self._free = [(0, size)]  # by address
        self._returned: deque[tuple[int, int]] = deque()  # by whichever thread let go of the last tensor
        ctypes.memset(self._bytes.ctypes.data, 0, min(size, touched))

    def take(self, n_bytes: int) -> Tensor:
        """[n_bytes] uint8 of no particular content; from elsewhere where no piece is large enough."""
        self._collect()
        size = max(1, -(-n_bytes // _ALIGN)) * _ALIGN
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                return self._lent(start, n_bytes, start + size)
        return torch.empty(n_bytes, dtype=torch.uint8)

    @property
    def free_bytes(self) -> int:
        """What is not lent."""
        self._collect()
        return sum(stop - start for start, stop in self._free)

    def _lent(self, start: int, n_bytes: int, stop: int) -> Tensor:
        piece: NDArray[np.uint8] = self._bytes[start : start + n_bytes]
        weakref.finalize(piece, self._returned.append, (start, stop))  # held by the storage until nothing views it
        return torch.from_numpy(piece)

    def _collect(self) -> None:
        """Join what came back with what was free."""
        pieces = list(self._free)
        while self._returned:
            pieces.append(self._returned.popleft())
        self._free = []
        for start, stop in sorted(pieces):
            if self._free and self._free[-1][1] == start:
                start = self._free.pop()[0]
            self._free.append((start, stop))
