"""Compile the kernels: `python -m precis.native.build`, or when the package is installed. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
_WIDE = "-mprefer-vector-width=512"
_LEVELS = {
    "amx": ["-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mavx512bf16", _WIDE],
    "x86-64-v4": ["-march=x86-64-v4", _WIDE],
    "x86-64-v3": ["-march=x86-64-v3"],
    "": [],
}


def build(folder: Path = _FOLDER, compiler: str | None = None) -> list[Path]:
    """The files made: one per instruction level, none without a compiler; by default one that is on the PATH.

    Raises:
        RuntimeError: with the compiler's words, if it fails.
    """
    compiler = compiler or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if not compiler or platform.system() != "Linux":
        return []
    made = []
    x86 = platform.machine() == "x86_64"
    for level, options in _LEVELS.items() if x86 else [("", [])]:
        target = folder / f"_precis-{platform.machine()}-{level or 'plain'}.so"
        part = target.with_suffix(f".{os.getpid()}.part")
        flags = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi", *options]
        command = [*compiler.split(), *flags, *map(str, sorted(folder.glob("*.cpp"))), "-o", str(part)]
        for extra in (["-fopenmp"], []):  # not every compiler comes with it
            done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        part.replace(target)
        made.append(target)
    return made


if __name__ == "__main__":
    found = build()
    sys.stdout.write("".join(f"{path}\n" for path in found) or "no compiler: torch will compute instead\n")
