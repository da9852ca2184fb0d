"""Servers as they are in production: TLS, users that may do what they must, and no more."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.stack import Server, Stack, running_stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EXACT = {"policy": "full", "codec": "raw16"}
QUEUE_USER = ["on", ">queue-password", "~{precis}:*", "&*", "+@all", "-@dangerous", "+info", "+keys", "-@admin"]
STORE_USER = ["on", ">store-password", "~snapshot:*", "~staging:*", "+@all", "-@dangerous", "+info", "-@admin"]


@dataclass
class Secured(Server):
    """A server that talks TLS on a port of loopback only."""

    port: int = 0

    @property
    def url(self) -> str:
        """With the authority that signed its certificate."""
        return f"rediss://USER@127.0.0.1:{self.port}/0?ssl_ca_certs={self.folder}/cert.pem"

    def as_user(self, name: str, password: str) -> str:
        return self.url.replace("USER", f"{name}:{password}")

    def admin(self) -> Any:
        return redis.Redis.from_url(self.url.replace("USER@", ""), socket_timeout=10)


def certificate(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key.pem").write_bytes(private)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    flags += ["--tls-cert-file", f"{folder}/cert.pem", "--tls-key-file", f"{folder}/key.pem"]
    flags += ["--tls-ca-cert-file", f"{folder}/cert.pem", "--tls-auth-clients", "no"]
    server = Secured(folder, port=port)
    log = (folder / "log").open("w")
    server.process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
    try:
        wait_for(lambda: server.admin().ping(), 20)
        admin = server.admin()
        admin.execute_command("ACL", "SETUSER", "queue", *QUEUE_USER)
        admin.execute_command("ACL", "SETUSER", "store", *STORE_USER)
        yield server
    finally:
        server.stop()
        log.close()


@pytest.fixture(scope="module")
def own(secured: Secured, tiny_folder: Path) -> Iterator[Stack]:
    urls = {
        "PRECIS_QUEUE_URL": secured.as_user("queue", "queue-password"),
        "PRECIS_STORE_URL": secured.as_user("store", "store-password"),
    }
    with running_stack(secured, tiny_folder, **urls) as stack:
        yield stack


def test_all_of_it_works_over_tls_with_users_that_may_little(own: Stack, secured: Secured) -> None:
    http = own.http()
    body = {"text": DOCUMENT, "compression": EXACT, "ttl_s": 600}
    context = http.post("/v1/contexts?wait=60", json=body).json()
    assert context["status"] == "ready", context
    url = f"/v1/contexts/{context['id']}"
    session = http.post(f"{url}/sessions").json()["id"]
    for fields in ({}, {"session": session}, {"session": session}):
        found = http.post(f"{url}/queries", json={"question": "Who?", "max_tokens": 4, **fields})
        assert found.status_code == 200, found.text
    exported = http.get(f"{url}/snapshot").content
    assert http.post(f"{url}/append?wait=60", json={"text": "More."}).json()["status"] == "ready"
    assert http.post("/v1/contexts/import?wait=60", content=exported).json()["status"] == "ready"
    assert http.patch(url, json={"pinned": True}).status_code == 200
    assert http.get("/metrics").status_code == 200
    own.kill("worker")
    own.start_worker()
    assert http.post(f"{url}/queries", json={"question": "Who?", "max_tokens": 4}).headers["x-cache"] == "hit; store"
    assert http.delete(url).json()["freed_bytes"] > 0
    denied = secured.admin().execute_command("ACL", "LOG")
    assert denied == [], denied


def test_the_users_cannot_do_what_they_need_not(secured: Secured) -> None:
    for name in ("queue", "store"):
        client: Any = redis.Redis.from_url(secured.as_user(name, f"{name}-password"))
        for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("SET", "elsewhere", "1"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(secured.as_user("queue", "wrong")).ping()
    with pytest.raises(redis.exceptions.ConnectionError, match="certificate"):
        redis.Redis.from_url(f"rediss://127.0.0.1:{secured.port}").ping()
