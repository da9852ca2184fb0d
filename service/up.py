"""`precis up`: everything on one machine, supervised. Starts Valkey, the API and one worker, and stops them cleanly."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import httpx
from rich.console import Console
from rich.text import Text

from service import embedded
from service.settings import check_exposure

_COLOURS = {"valkey": "magenta", "api": "cyan", "worker": "green", "precis": "bold"}
_STOP_S = 40.0
_READY_S = 600.0
_RESTARTS, _RESTART_WINDOW_S = 5, 60.0
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Options:
    """What `precis up` was asked for."""

    host: str
    port: int
    data_dir: Path
    model: str
    policy: str
    ready_file: Path | None


@dataclass(slots=True)
class Child:
    """One supervised process."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    starts: deque[float] = field(default_factory=deque)


class Supervisor:
    """Owns the children of one data directory."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options, self._console = options, console
        self._children: list[Child] = []
        self._stopping = 0
        self._lock: IO[str] | None = None
        self._base_url = ""

    def run(self) -> int:
        """Start, supervise, stop; the exit code."""
        options = self._options
        try:
            check_exposure(options.host, os.environ.get("PRECIS_ADMIN_KEY", ""), open_to_all=_is_open(os.environ))
        except SystemExit as error:
            self._say(str(error))
            return 1
        options.data_dir.mkdir(parents=True, exist_ok=True)
        if not self._take_lock():
            return 1
        try:
            listening = self._listen()
        except OSError as error:
            self._say(f"cannot listen on {options.host}:{options.port} ({error.strerror}): choose another with --port")
            return 1
        self._base_url = f"http://{options.host}:{listening.getsockname()[1]}"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._start_all(listening)
            return self._supervise()
        except SystemExit as error:
            self._say(str(error))
            return 1
        finally:
            self._stop_all()
            self._clear_files()

    def _take_lock(self) -> bool:
        path = self._options.data_dir / "up.json"
        self._lock = path.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            with contextlib.suppress(json.JSONDecodeError):
                other = json.loads(self._lock.read() or "{}")
                where = f" at {other['url']} (pid {other['pid']})" if "url" in other else ""
                self._say(f"precis is already running on {self._options.data_dir}{where}")
            return False
        os.set_inheritable(self._lock.fileno(), False)
        return True

    def _listen(self) -> socket.socket:
        made = socket.create_server((self._options.host, self._options.port), backlog=2048)
        made.set_inheritable(True)
        return made

    def _start_all(self, listening: socket.socket) -> None:
        options = self._options
        environment = {**os.environ, "PRECIS_DATA_DIR": str(options.data_dir), "PRECIS_MODEL": options.model}
        environment["PRECIS_HOST"] = options.host
        environment |= {"PRECIS_DEFAULT_POLICY": options.policy, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("PRECIS_METRICS_PORT", "0")
        environment.pop("PRECIS_PORT", None)
        if "PRECIS_QUEUE_URL" not in environment:
            environment["PRECIS_QUEUE_URL"] = embedded.url(options.data_dir)
            self._add("valkey", self._start_valkey)
        if options.model == DEFAULT_MODEL:
            self._unpack(environment)
        self._add("worker", lambda: self._spawn("worker", [sys.executable, "-m", "workers"], environment))
        api = [sys.executable, "-m", "service.app", "--fd", str(listening.fileno())]
        self._add("api", lambda: self._spawn("api", api, environment, (listening.fileno(),)))

    def _add(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._children.append(Child(name, start, start(), deque([time.monotonic()])))

    def _start_valkey(self) -> subprocess.Popen[bytes]:
        embedded.clear_way(self._options.data_dir)
        process = self._spawn(
            "valkey", embedded.command(self._options.data_dir, embedded.memory_limit()), dict(os.environ)
        )
        embedded.wait_ready(self._options.data_dir, process)
        return process

    def _unpack(self, environment: dict[str, str]) -> None:
        """First start only: the default model's folder, with a progress bar on the terminal."""
        done = subprocess.run(
            [sys.executable, "-m", "workers.unpack", str(self._options.data_dir)], env=environment, check=False
        )
        if done.returncode != 0:
            raise SystemExit("the default model could not be unpacked; see the message above")

    def _spawn(
        self, name: str, command: list[str], environment: dict[str, str], pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        """A child of its own process group, so that Ctrl-C reaches only the supervisor; its output joins the log."""
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=embedded.die_with_parent,
        )
        threading.Thread(target=self._copy_log, args=(name, process.stdout), daemon=True).start()
        return process

    def _copy_log(self, name: str, lines: IO[bytes]) -> None:
        for raw in lines:
            self._line(name, Text.from_ansi(raw.decode(errors="replace").rstrip()))

    def _line(self, name: str, text: Text | str) -> None:
        self._console.print(Text(f"{name:>7} | ", style=_COLOURS[name]), text, sep="", soft_wrap=True, highlight=False)

    def _say(self, text: str) -> None:
        self._line("precis", text)

    def _supervise(self) -> int:
        began = time.monotonic()
        ready = False
        while not self._stopping:
            if not ready and self._is_ready():
                ready = True
                self._announce(time.monotonic() - began)
            elif not ready and time.monotonic() - began > _READY_S:
                self._say("not ready after ten minutes; the log above says why")
                return 1
            for child in self._children:
                if child.process.poll() is not None and not self._stopping and not self._restart(child):
                    return 1
            time.sleep(0.1 if not ready else 0.25)
        return 0

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._base_url}/readyz", timeout=2).status_code == 200
        return False

    def _announce(self, seconds: float) -> None:
        self._say(f"ready at {self._base_url} after {seconds:.1f} s, data in {self._options.data_dir}, Ctrl-C stops")
        command = "precis" if shutil.which("precis") else os.path.relpath(sys.argv[0])
        self._say(f'try: {command} put FILE, then {command} ask ID "question"')
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.write(json.dumps({"url": self._base_url, "pid": os.getpid()}))
            self._lock.flush()
        if self._options.ready_file is not None:
            partial = self._options.ready_file.with_suffix(".partial")
            partial.write_text(self._base_url + "\n")
            partial.rename(self._options.ready_file)

    def _restart(self, child: Child) -> bool:
        """Start a child again; False if it keeps dying."""
        now = time.monotonic()
        while child.starts and now - child.starts[0] > _RESTART_WINDOW_S:
            child.starts.popleft()
        code = child.process.returncode
        if len(child.starts) >= _RESTARTS or (child.name == "worker" and code == 2):
            self._say(f"{child.name} ended with code {code} and is not started again: stopping")
            return False
        self._say(f"{child.name} ended with code {code}: starting it again")
        child.starts.append(now)
        child.process = child.start()
        return True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping += 1
        if self._stopping > 1:
            self._kill(self._children)

    def _stop_all(self) -> None:
        """API and worker first, so that answers end and jobs are given back; the store last."""
        if self._children:
            self._say("stopping")
        stores = [child for child in self._children if child.name == "valkey"]
        for group in ([child for child in self._children if child not in stores], stores):
            for child in group:
                if child.process.poll() is None:
                    child.process.terminate()
            deadline = time.monotonic() + _STOP_S
            for child in group:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.1, deadline - time.monotonic()))
            self._kill(group)
        if self._children:
            self._say("stopped")

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            if child.process.poll() is None:
                self._say(f"{child.name} did not stop: killing it")
                child.process.kill()
                child.process.wait()

    def _clear_files(self) -> None:
        if self._options.ready_file is not None:
            self._options.ready_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()


def _is_open(environment: Mapping[str, str]) -> bool:
    return environment.get("PRECIS_OPEN", "").lower() in ("1", "true", "yes", "on")
