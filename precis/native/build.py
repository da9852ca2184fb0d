"""Compile the kernels: `python -m precis.native.build`, or when the package is installed. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FOLDER = Path(__file__).parent
_WIDE = "-mprefer-vector-width=512"
_FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]
_LEVELS = {
    "amx": ["-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mavx512bf16", _WIDE],
    "x86-64-v4": ["-march=x86-64-v4", _WIDE],
    "x86-64-v3": ["-march=x86-64-v3"],
    "": [],
}


def build(folder: Path = _FOLDER, compiler: str | None = None) -> list[Path]:
    """The files made: one per instruction level that the compiler knows, none without one.

    Args:
        folder: with the sources, and where the files go.
        compiler: by default one that is on the PATH.

    Raises:
        RuntimeError: with the compiler's words, if not even the plainest level can be had.
    """
    compiler = compiler or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if not compiler or platform.system() != "Linux":
        return []
    x86 = platform.machine() == "x86_64"
    sources = list(map(str, sorted(folder.glob("*.cpp"))))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = [
            pool.submit(_compile, compiler.split(), sources, folder, level) for level in (_LEVELS if x86 else [""])
        ]
    found = [done.result() for done in wanted]
    plainest, words = found[-1]
    if plainest is None:
        raise RuntimeError(words)
    return [path for path, _ in found if path is not None]


def _compile(compiler: list[str], sources: list[str], folder: Path, level: str) -> tuple[Path | None, str]:
    """One instruction level's file, with OpenMP if the compiler has it; or what the compiler says."""
    target = folder / f"_precis-{platform.machine()}-{level or 'plain'}.so"
    part = target.with_suffix(f".{os.getpid()}.part")
    command = [*compiler, *_FLAGS, *_LEVELS[level], *sources, "-o", str(part)]
    for extra in (["-fopenmp"], []):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            part.replace(target)
            return target, ""
    return None, f"{' '.join(command)}\n{done.stderr}"


if __name__ == "__main__":
    found = build()
    sys.stdout.write("".join(f"{path}\n" for path in found) or "no compiler: torch will compute instead\n")
