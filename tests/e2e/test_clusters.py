"""A Redis Cluster of three nodes, and sentinels that follow a failover: all of it works on both."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.stack import Server, running_stack, server_binary, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EXACT = {"policy": "full", "codec": "raw16"}
SLOTS = (0, 5461, 10923, 16384)


def free_ports(n: int) -> list[int]:
    """Below 55,000: a node's bus listens 10,000 higher."""
    found: list[int] = []
    while len(found) < n:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if port < 55_000 and port not in found:
            found.append(port)
    return found


class Nodes(Server):
    """Servers on ports of loopback, in one folder."""

    def __init__(self, folder: Path, ports: list[int], url: str) -> None:
        super().__init__(folder)
        self.ports, self._url = ports, url
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return self._url

    def run(self, port: int, *flags: str) -> None:
        own = self.folder / str(port)
        own.mkdir(exist_ok=True)
        command = [server_binary(), *flags, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(own)]
        log = (own / "log").open("ab")
        self._running[port] = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: self.at(port).ping())

    def at(self, port: int) -> Any:
        return redis.Redis(port=port, socket_timeout=10, decode_responses=True)

    def kill(self, port: int) -> None:
        process = self._running.pop(port)
        process.kill()
        process.wait(30)

    def stop(self, number: int = 0) -> None:
        for port in list(self._running):
            self.kill(port)


@contextlib.contextmanager
def nodes(ports: list[int], url: str) -> Iterator[Nodes]:
    made = Nodes(Path(tempfile.mkdtemp(prefix="precis-")), ports, url)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(made.folder, ignore_errors=True)


def met(node: Any) -> bool:
    """Whether a node of a cluster knows the others, and all slots."""
    told = node.execute_command("CLUSTER", "INFO")
    return "cluster_state:ok" in told and "cluster_known_nodes:3" in told


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    ports = free_ports(3)
    listed = ",".join(f"127.0.0.1:{port}" for port in ports)
    with nodes(ports, f"redis+cluster://{listed}") as made:
        for port in ports:
            made.run(port, "--cluster-enabled", "yes", "--save", "", "--cluster-node-timeout", "2000")
        for index, port in enumerate(ports):
            made.at(port).execute_command("CLUSTER", "ADDSLOTSRANGE", SLOTS[index], SLOTS[index + 1] - 1)
            made.at(port).execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            made.at(ports[0]).execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        wait_for(lambda: all(met(made.at(port)) for port in ports))
        yield made


def used(http: httpx.Client, text: str) -> dict[str, Any]:
    """Everything that talks to the store: upload, answers, a session, export, append, import."""
    context: dict[str, Any] = http.post(
        "/v1/contexts?wait=60", json={"text": text, "compression": EXACT, "ttl_s": 600}
    ).json()
    assert context["status"] == "ready", context
    url = f"/v1/contexts/{context['id']}"
    session = http.post(f"{url}/sessions").json()["id"]
    for fields in ({}, {"session": session}, {"session": session}):
        found = http.post(f"{url}/queries", json={"question": "Who?", "max_tokens": 4, **fields})
        assert found.status_code == 200, found.text
    exported = http.get(f"{url}/snapshot").content
    assert http.post(f"{url}/append?wait=60", json={"text": "More."}).json()["status"] == "ready"
    assert http.post("/v1/contexts/import?wait=60", content=exported).json()["status"] == "ready"
    return context


def test_all_of_it_works_on_a_cluster(cluster: Nodes, tiny_folder: Path) -> None:
    with running_stack(cluster, tiny_folder) as stack:
        http = stack.http()
        made = [used(http, f"{number}. {DOCUMENT}") for number in range(6)]
        holding = [
            port for port in cluster.ports if any(k.startswith("snapshot:") for k in cluster.at(port).scan_iter())
        ]
        assert len(holding) >= 2  # snapshots spread; jobs and records have one hash tag
        assert http.get("/readyz").status_code == 200
        counted = http.get("/metrics").text
        total = sum(cluster.at(port).info("memory")["used_memory"] for port in cluster.ports)
        told = [line for line in counted.splitlines() if 'store_memory_bytes{kind="used",server="store"}' in line]
        assert 0.5 * total < float(told[0].split()[-1]) < 2 * total
        stack.kill("worker")
        stack.start_worker()
        for context in made:
            found = http.post(f"/v1/contexts/{context['id']}/queries", json={"question": "Who?", "max_tokens": 4})
            assert (found.status_code, found.headers["x-cache"]) == (200, "hit; store")
            assert http.delete(f"/v1/contexts/{context['id']}").json()["freed_bytes"] > 0


def test_a_failover_is_followed_and_nothing_acknowledged_is_lost(tiny_folder: Path) -> None:
    master, replica, sentinel, nobody = ports = free_ports(4)
    listed = f"127.0.0.1:{nobody},127.0.0.1:{sentinel}"
    with nodes(ports, f"redis+sentinel://{listed}/mymaster/0") as servers:
        servers.run(master, "--save", "")
        servers.run(replica, "--save", "", "--replicaof", "127.0.0.1", str(master))
        wait_for(lambda: servers.at(replica).info("replication")["master_link_status"] == "up")
        watching = servers.folder / "sentinel.conf"
        times = {"down-after-milliseconds": 1000, "failover-timeout": 5000}
        said = [f"sentinel monitor mymaster 127.0.0.1 {master} 1"]
        watching.write_text(
            "\n".join([*said, *(f"sentinel {name} mymaster {ms}" for name, ms in times.items())]) + "\n"
        )
        servers.run(sentinel, str(watching), "--sentinel")
        wait_for(lambda: servers.at(sentinel).execute_command("SENTINEL", "REPLICAS", "mymaster"))
        with running_stack(servers, tiny_folder) as stack:
            http = stack.http()
            context = used(http, DOCUMENT)
            ask = {"question": "Who?", "max_tokens": 4}
            url = f"/v1/contexts/{context['id']}/queries"
            before = http.post(url, json=ask).json()["text"]
            servers.at(master).execute_command("WAIT", 1, 5000)
            servers.kill(master)
            wait_for(lambda: servers.at(replica).info("replication")["role"] == "master", 30)
            wait_for(lambda: http.get("/readyz").status_code == 200, 60)
            after = wait_for(lambda: http.post(url, json=ask).json().get("text"), 60)
            assert after == before
            used(http, f"Another. {DOCUMENT}")
