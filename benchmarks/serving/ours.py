"""The service as its users have it: started by `precis up`, asked over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from service.client import Client


class Service:
    """One running `precis up` on a data folder."""

    def __init__(self, data_dir: Path, environment: dict[str, str]) -> None:
        self._data_dir, self._environment = data_dir, environment
        self.start()

    def start(self) -> None:
        """Start everything, and wait until it serves."""
        ready = self._data_dir / "ready"
        ready.unlink(missing_ok=True)
        self._data_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "service.cli", "up", "--port", "0", "--data-dir", str(self._data_dir)]
        self._log = (self._data_dir / "log").open("a")
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            env={**os.environ, **self._environment},
            stdout=self._log,
            stderr=self._log,
        )
        while not (ready.exists() and ready.read_text()):
            if self.process.poll() is not None:
                raise RuntimeError((self._data_dir / "log").read_text()[-2000:])
            time.sleep(0.05)
        self._client = Client(ready.read_text().strip())

    def stop(self) -> None:
        """End it well, so that what was stored is there again after the next start."""
        self.process.terminate()
        self.process.wait()
        self._log.close()

    def put(self, text: str, compression: dict[str, Any]) -> dict[str, Any]:
        """Upload a document, and wait."""
        made = self._client.call("POST", "/v1/contexts?wait=600", json={"text": text, "compression": compression})
        if made["status"] != "ready":
            raise RuntimeError(str(made))
        return made

    def ask(self, context_id: str, question: str, n_tokens: int) -> tuple[float, float, int]:
        """Times of the first token and of the end, on the clock, and tokens."""
        body = {"question": question, "max_tokens": n_tokens, "stream": True, "ignore_eos": True}
        first, n = 0.0, 0
        for event in self._client.stream("POST", f"/v1/contexts/{context_id}/queries", json=body):
            if event.name == "error":
                raise RuntimeError(str(event.data))
            if event.name == "token":
                first = first or time.perf_counter()
            if event.name == "done":
                n = event.data["usage"]["completion_tokens"]
        return first, time.perf_counter(), n

    @property
    def resident_bytes(self) -> int:
        """Of the worker."""
        workers = [p for p in psutil.Process(self.process.pid).children() if "workers" in p.cmdline()]
        return sum(int(process.memory_info().rss) for process in workers)
