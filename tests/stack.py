"""Real processes for tests: a Valkey or Redis server, the API, workers. All listen on loopback or a socket file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

import workers.__main__
from service import embedded

START_S = 90.0


def server_binary() -> str:
    """The embedded Valkey, or what PRECIS_TEST_SERVER names."""
    return os.environ.get("PRECIS_TEST_SERVER") or str(embedded.binary())


@dataclass
class Server:
    """One Valkey or Redis server with an append-only file, on a socket in a folder of its own."""

    folder: Path
    extra: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    restore_signals: bool = True

    @property
    def url(self) -> str:
        """For clients."""
        return f"unix://{self.folder}/s"

    def start(self) -> None:
        """Start, and wait until the data are loaded."""
        flags = ["--port", "0", "--unixsocket", f"{self.folder}/s", "--dir", str(self.folder), "--save", ""]
        flags += ["--appendonly", "yes", "--appendfsync", "always", *self.extra]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([server_binary(), *flags], restore_signals=self.restore_signals, **quiet)
        wait_for(lambda: self.client().ping(), START_S)

    def client(self, **options: Any) -> Any:
        """A plain client."""
        return redis.Redis.from_url(self.url, socket_timeout=10, **options)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(30)
            self.process = None


@contextlib.contextmanager
def running_server(*extra: str) -> Iterator[Server]:
    """A server for a while."""
    folder = Path(tempfile.mkdtemp(prefix="precis-"))
    server = Server(folder, extra)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


ADMIN_KEY = "an admin key that is long enough"


def wait_for(condition: Any, seconds: float = 20.0, step: float = 0.02) -> Any:
    """The condition's first true value; errors count as false until time is up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = condition()
        except (redis.RedisError, httpx.HTTPError, OSError):
            found = None
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(step)


def _run_worker(environment: dict[str, str], log: str) -> None:
    """In a forked child: be a worker."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if clock := environment.get("TEST_CLOCK"):  # a file that says by how many seconds this worker's clock is wrong
        true = time.time
        time.time = lambda: true() + float(Path(clock).read_text())
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.exit(workers.__main__.main())


class Forked:
    """A real worker process, forked from a server that has imported torch and transformers once."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["workers.__main__", "tests.stack"])

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._process = self._context.Process(target=_run_worker, args=(environment, str(log)))
        self._process.start()
        self.pid = self._process.pid or 0

    def send_signal(self, number: int) -> None:
        """As subprocess.Popen."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As subprocess.Popen."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """As subprocess.Popen."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise AssertionError(f"worker {self.pid} did not end within {timeout} s")
        return self._process.exitcode


@dataclass
class Stack:
    """API and workers on one server."""

    server: Server
    model: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes] | Forked] = field(default_factory=dict)
    base_url: str = ""

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECIS_")}
        return {**clean, "PRECIS_QUEUE_URL": self.server.url, **self.environment, **extra}

    def start_api(self, name: str = "api", port: int = 0, **extra: str) -> None:
        """Start an API process, on a free port if none is given."""
        listening = socket.create_server(("127.0.0.1", port))
        listening.set_inheritable(True)
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", "service.app", "--fd", str(listening.fileno())]
        with (self.server.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self._environment(extra),
                stdout=log,
                stderr=log,
                pass_fds=(listening.fileno(),),
                start_new_session=True,
            )
        listening.close()
        wait_for(lambda: httpx.get(f"{self.base_url}/healthz").status_code == 200, START_S)

    def start_worker(self, name: str = "worker", *, wait: bool = True, **extra: str) -> None:
        """Start a worker; wait until it has announced itself."""
        worker = {
            "PRECIS_MODEL": str(self.model),
            "PRECIS_METRICS_PORT": "0",
            "PRECIS_LEASE_S": "2",
            "PRECIS_THREADS": "1",
            "PRECIS_DTYPE": "float32",  # so that what is asked twice in different ways is answered alike
        }
        environment = self._environment({**worker, **extra})
        self.processes[name] = Forked(environment, self.server.folder / f"{name}.log")
        if wait:
            wait_for(lambda: self.processes[name].pid in self.worker_pids(), START_S)
            wait_for(lambda: httpx.get(f"{self.base_url}/readyz").status_code == 200, START_S)

    def worker_pids(self) -> list[int]:
        """Of the workers that the API sees."""
        return [worker["pid"] for worker in self.http().get("/v1/workers").json()["data"]]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process by a signal and wait for it."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(60)

    def log(self, name: str) -> str:
        """What a process wrote."""
        return (self.server.folder / f"{name}.log").read_text()

    def http(self, **options: Any) -> httpx.Client:
        """A client of the API."""
        key = self.environment.get("PRECIS_ADMIN_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.base_url, **{"headers": headers, "timeout": 120, **options})

    def close(self) -> None:
        """End every process."""
        for process in self.processes.values():
            process.kill()
            process.wait(30)
        self.processes.clear()


@contextlib.contextmanager
def running_stack(server: Server, model: Path, **environment: str) -> Iterator[Stack]:
    """API and workers for a while."""
    stack = Stack(server, model, environment)
    try:
        stack.start_api()
        stack.start_worker()
        yield stack
    except BaseException:
        for name in stack.processes:
            sys.stderr.write(f"--- {name}\n{stack.log(name)[-3000:]}\n")
        raise
    finally:
        stack.close()
