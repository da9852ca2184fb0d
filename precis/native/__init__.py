"""Kernels in C++, compiled when the package is installed; where they are missing, torch computes the same."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
LEVELS = ("x86-64-v4", "x86-64-v3", "")  # of instructions, best first; "" is whatever every such machine has


@cache
def library() -> ctypes.CDLL | None:
    """The best compiled file that this machine can run, or None."""
    has = torch.backends.cpu.get_cpu_capability()
    levels = {"AVX512": LEVELS, "AVX2": LEVELS[1:]}.get(has, LEVELS[2:])
    for level in levels:
        path = file_of(level)
        if path.exists():
            return opened(path)
    return None


def opened(path: Path) -> ctypes.CDLL:
    """A compiled file with the types of its functions that need some."""
    found = ctypes.CDLL(str(path))
    found.precis_rans_encode.restype = ctypes.c_int64
    return found


def file_of(level: str) -> Path:
    """The compiled file of an instruction level."""
    return FOLDER / f"_precis-{platform.machine()}-{level or 'plain'}.so"
