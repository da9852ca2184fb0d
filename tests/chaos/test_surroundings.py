"""What is around the processes goes wrong: the network, the disk, the clock, a client that does not read."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from precis.wire import keys
from tests.chaos.proxy import Mode, Proxy
from tests.stack import Server, Stack, running_server, running_stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EXACT = {"policy": "full", "codec": "raw16"}
ASK = {"question": "Who?", "max_tokens": 6}


@contextlib.contextmanager
def split(model: Path, cut: str) -> Iterator[tuple[Stack, Proxy]]:
    """A stack in which one process reaches the store through a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running_server("--port", str(port), "--bind", "127.0.0.1") as server:
        proxy = Proxy(port)
        stack = Stack(server, model, {"PRECIS_WORKER_GRACE_S": "3"})
        far: Any = {"PRECIS_QUEUE_URL": f"redis://127.0.0.1:{proxy.port}/0"}
        try:
            stack.start_api(**(far if cut == "api" else {}))
            stack.start_worker(**(far if cut == "worker" else {}))
            yield stack, proxy
        finally:
            stack.close()
            proxy.close()


def ready(http: httpx.Client, text: str, **fields: Any) -> str:
    body = {"text": text, "compression": EXACT, **fields}
    context = http.post("/v1/contexts?wait=60", json=body).json()
    assert context["status"] == "ready", context
    found: str = context["id"]
    return found


def asked(http: httpx.Client, context_id: str) -> httpx.Response:
    return http.post(f"/v1/contexts/{context_id}/queries", json=ASK)


def asked_once(stack: Stack) -> tuple[httpx.Client, str, str]:
    """A client, a context, and what it answers while all is well."""
    http = stack.http()
    context_id = ready(http, DOCUMENT)
    return http, context_id, asked(http, context_id).json()["text"]


@pytest.mark.parametrize("mode", ["hold", "refuse"])
def test_a_worker_that_is_cut_off_loses_its_jobs_to_another_and_comes_back(tiny_folder: Path, mode: Mode) -> None:
    with split(tiny_folder, "worker") as (stack, proxy):
        http, context_id, before = asked_once(stack)
        stack.start_worker("near")
        proxy.mode = mode
        time.sleep(3)  # longer than a lease of 2 s
        for number in range(4):  # some were for the one that is away
            found = asked(http, context_id)
            assert found.status_code in (200, 500, 503), found.text
            if found.status_code == 200:
                assert found.json()["text"] == before
            assert ready(http, f"{number}. {DOCUMENT}")
        proxy.mode = "pass"
        wait_for(lambda: len(stack.worker_pids()) == 2, 90)
        stack.kill("near")
        again = wait_for(lambda: (f := asked(http, context_id)).status_code == 200 and f, 60)
        assert again.json()["text"] == before
        assert stack.server.client().xlen(keys.DEAD) == 0


@pytest.mark.parametrize("mode", ["hold", "refuse"])
def test_an_api_that_is_cut_off_says_so_and_comes_back(tiny_folder: Path, mode: Mode) -> None:
    with split(tiny_folder, "api") as (stack, proxy):
        http, context_id, before = asked_once(stack)
        proxy.mode = mode
        with contextlib.suppress(httpx.TimeoutException):
            told = http.get("/readyz", timeout=5)
            assert told.status_code == 503
        assert httpx.get(f"{stack.base_url}/healthz", timeout=5).status_code == 200
        if mode == "refuse":
            told = asked(http, context_id)
            assert (told.status_code, told.json()["code"]) == (503, "over_capacity"), told.text
        proxy.mode = "pass"
        again = wait_for(lambda: (f := asked(http, context_id)).status_code == 200 and f, 60)
        assert again.json()["text"] == before


class FullDisk(Server):
    """A server whose files may not grow beyond a bound, as on a disk that is full."""

    def limit(self, n_bytes: int) -> None:
        assert self.process is not None
        psutil.Process(self.process.pid).rlimit(psutil.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    server = FullDisk(tmp_path, ("--appendfsync", "everysec"), restore_signals=False)
    held = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # inherited: the server gets EFBIG, as it would get ENOSPC
    try:
        server.start()
    finally:
        signal.signal(signal.SIGXFSZ, held)
    yield server
    server.stop(signal.SIGKILL)


def test_a_full_disk_is_said_and_nothing_acknowledged_is_lost(full_disk: FullDisk, tiny_folder: Path) -> None:
    with running_stack(full_disk, tiny_folder) as stack:
        http, context_id, before = asked_once(stack)
        written = max(path.stat().st_size for path in full_disk.folder.rglob("*.aof"))
        full_disk.limit(written + 10_000)
        refused, acknowledged = None, []
        for number in range(40):
            told = http.post("/v1/contexts", json={"text": f"{number}. {DOCUMENT}", "compression": EXACT})
            if told.status_code not in (200, 202):
                refused = told
                break
            acknowledged.append(told.json()["id"])
            time.sleep(0.2)
        assert refused is not None
        assert refused.status_code in (503, 507), refused.text
        assert "disk" in refused.json()["detail"], refused.text
        assert http.get("/healthz").status_code == 200
        full_disk.limit(resource.RLIM_INFINITY)
        for each in acknowledged:
            wait_for(lambda: http.get(f"/v1/contexts/{each}").json()["status"] == "ready", 60)  # noqa: B023
        found = wait_for(lambda: (f := asked(http, context_id)).status_code == 200 and f, 30)
        assert found.json()["text"] == before


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_clocks_that_jump_change_no_answer_and_expire_nothing(tiny_folder: Path, tmp_path: Path, jump: float) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    with running_server() as server, running_stack(server, tiny_folder, TEST_CLOCK=str(clock)) as stack:
        http = stack.http()
        context_id = ready(http, DOCUMENT, ttl_s=600)
        before = asked(http, context_id).json()
        clock.write_text(str(jump))  # the worker's; the API's and the store's stay
        after = asked(http, context_id).json()
        assert after["text"] == before["text"]
        assert all(after["timings"][name] >= 0 for name in ("queue_ms", "load_ms", "prefill_ms", "decode_ms"))
        assert asked(http, ready(http, f"Later. {DOCUMENT}", ttl_s=600)).status_code == 200
        stack.kill("worker", signal.SIGTERM)
        stack.start_worker()
        assert asked(http, context_id).headers["x-cache"] == "hit; store"
        assert len(stack.worker_pids()) == 1


def test_clients_that_do_not_read_hold_up_nobody(tiny_folder: Path) -> None:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_SLOTS="4") as stack:
        http = stack.http()
        context_id = ready(http, DOCUMENT)
        body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/contexts/{context_id}/queries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        slow = []
        for _ in range(3):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", int(stack.base_url.rsplit(":", 1)[1])))
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            slow.append(client)
        half = socket.create_connection(("127.0.0.1", int(stack.base_url.rsplit(":", 1)[1])))
        half.sendall(b"POST /v1/contexts HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")  # and says no more
        for _ in range(6):
            assert asked(http, context_id).status_code == 200
        for client in (*slow, half):
            client.close()
        wait_for(lambda: all(q["answers"] == 0 for q in http.get("/v1/queues").json()["data"]), 60)
        assert asked(http, context_id).status_code == 200
