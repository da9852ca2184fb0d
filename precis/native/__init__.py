"""Kernels in C++, compiled when the package is installed; where they are missing, torch computes the same."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

_ARCH_PRCTL, _ASK_FOR, _TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64
FOLDER = Path(__file__).parent
LEVELS = ("amx", "x86-64-v4", "x86-64-v3", "")  # of instructions, best first; "" is whatever every such machine has


@cache
def library() -> ctypes.CDLL | None:
    """The best compiled file that this machine can run, or None."""
    found = level()
    return None if found is None else opened(file_of(found))


@cache
def level() -> str | None:
    """The instruction level of that file, or None."""
    return next((found for found in levels() if file_of(found).exists()), None)


def levels() -> tuple[str, ...]:
    """Of instructions that this machine has, best first."""
    has = torch.backends.cpu.get_cpu_capability()
    if has == "AVX512":
        return LEVELS if _has_tiles() else LEVELS[1:]
    return LEVELS[2:] if has == "AVX2" else LEVELS[3:]


def _has_tiles() -> bool:
    """Whether there are matrix tiles in bfloat16, and the kernel lets this process use them."""
    if platform.system() != "Linux" or " amx_bf16 " not in Path("/proc/cpuinfo").read_text().replace("\n", " "):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR, _TILE_DATA) == 0)


def opened(path: Path) -> ctypes.CDLL:
    """A compiled file with the types of its functions that need some."""
    found = ctypes.CDLL(str(path))
    found.precis_rans_encode.restype = ctypes.c_int64
    return found


def file_of(level: str) -> Path:
    """The compiled file of an instruction level."""
    return FOLDER / f"_precis-{platform.machine()}-{level or 'plain'}.so"
