"""Snapshots in a folder and in an S3 that moto plays: read when the store lost them, gone when the context is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from precis.wire import keys
from tests.e2e.test_metrics import of_worker
from tests.stack import Stack, running_server, running_stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EXACT = {"policy": "full", "codec": "raw16"}
ASK = {"question": "Who?", "max_tokens": 6}
SECRET = "0123456789abcdef0123456789abcdef"


class Bucket:
    """What an archive holds."""

    def __init__(self, folder: Path | None = None, s3: Any = None) -> None:
        self._folder, self._s3 = folder, s3

    def names(self) -> list[str]:
        if self._folder is not None:
            return sorted(path.name for path in self._folder.glob("snapshots/*"))
        found = self._s3.list_objects_v2(Bucket="precis").get("Contents", [])
        return sorted(each["Key"].rpartition("/")[2] for each in found)

    def read(self, name: str) -> bytes:
        if self._folder is not None:
            return (self._folder / "snapshots" / name).read_bytes()
        data: bytes = self._s3.get_object(Bucket="precis", Key=f"tier/snapshots/{name}")["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            (self._folder / "snapshots" / name).write_bytes(data)
        else:
            self._s3.put_object(Bucket="precis", Key=f"tier/snapshots/{name}", Body=data)


@pytest.fixture(scope="module", params=["file", "s3"])
def archived(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Bucket]]:
    settings = {"PRECIS_ENCRYPTION_KEYS": SECRET}
    if request.param == "file":
        folder = tmp_path_factory.mktemp("archive")
        settings["PRECIS_ARCHIVE_URL"] = f"file://{folder}"
        with running_server() as server, running_stack(server, tiny_folder, **settings) as stack:
            yield stack, Bucket(folder)
        return
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    login = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_REGION": "us-east-1"}
    endpoint = f"http://{host}:{port}"
    s3 = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="one", aws_secret_access_key="two", region_name="us-east-1"
    )
    s3.create_bucket(Bucket="precis")
    settings |= {
        **login,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "PRECIS_ARCHIVE_URL": "s3://precis/tier",
    }
    with running_server() as server, running_stack(server, tiny_folder, **settings) as stack:
        yield stack, Bucket(s3=s3)
    moto.stop()


def fresh(stack: Stack) -> None:
    """A worker that holds nothing."""
    stack.kill("worker", 15)
    stack.start_worker()


def made(stack: Stack, bucket: Bucket, text: str) -> str:
    body = {"text": text, "compression": EXACT}
    context: dict[str, Any] = stack.http().post("/v1/contexts?wait=60", json=body).json()
    assert context["status"] == "ready", context
    wait_for(lambda: context["id"] in bucket.names())
    found: str = context["id"]
    return found


def asked(stack: Stack, context_id: str) -> tuple[str, str]:
    found = stack.http().post(f"/v1/contexts/{context_id}/queries", json=ASK)
    assert found.status_code == 200, found.text
    return found.json()["text"], found.headers["x-cache"]


def test_what_the_store_lost_is_read_from_the_archive(archived: tuple[Stack, Bucket]) -> None:
    stack, bucket = archived
    context_id = made(stack, bucket, DOCUMENT)
    before = asked(stack, context_id)[0]
    stack.server.client().delete(keys.snapshot(context_id))
    fresh(stack)
    assert asked(stack, context_id) == (before, "hit; archive")
    assert asked(stack, context_id) == (before, "hit; memory")
    assert b"quick" not in bucket.read(context_id)
    assert of_worker(stack)['precis_snapshot_loads_total{"origin": "archive"}'] == 1
    made(stack, bucket, f"Counted. {DOCUMENT}")
    assert of_worker(stack)["precis_archived_bytes_total"] > 10_000
    assert bucket.read(context_id)[:8] == b"PRECISA1"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "nonsense", "other"])
def test_a_damaged_object_is_never_used(archived: tuple[Stack, Bucket], damage: str) -> None:
    stack, bucket = archived
    context_id = made(stack, bucket, f"{damage}. {DOCUMENT}")
    before, data = asked(stack, context_id)[0], bucket.read(context_id)
    middle = len(data) // 2
    changed = {
        "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "cut": data[:middle],
        "empty": b"",
        "nonsense": b"\xff" * 100,
    }
    if damage == "other":
        changed["other"] = bucket.read(made(stack, bucket, f"Another. {DOCUMENT}"))
    bucket.write(context_id, changed[damage])
    stack.server.client().delete(keys.snapshot(context_id))
    fresh(stack)
    text, cache = asked(stack, context_id)
    assert text == before
    assert cache in ("recomputed; corrupt", "recomputed; missing")


def test_objects_go_with_their_contexts(archived: tuple[Stack, Bucket]) -> None:
    stack, bucket = archived
    kept, gone = made(stack, bucket, f"Kept. {DOCUMENT}"), made(stack, bucket, f"Gone. {DOCUMENT}")
    body = {"text": f"Short. {DOCUMENT}", "compression": EXACT, "ttl_s": 3}
    expiring = stack.http().post("/v1/contexts?wait=60", json=body).json()["id"]
    assert stack.http().delete(f"/v1/contexts/{gone}").status_code == 200
    wait_for(lambda: not {gone, expiring} & set(bucket.names()), 30)
    assert kept in bucket.names()
    assert stack.server.client().scard(keys.UNARCHIVED) == 0
    assert not stack.server.client().sismember(keys.ARCHIVED, gone)


def test_an_archive_that_is_away_stops_nothing(tiny_folder: Path) -> None:
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x"}
    login = {"AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two"}
    settings = {**away, **login, "PRECIS_ARCHIVE_URL": "s3://precis"}
    with running_server() as server, running_stack(server, tiny_folder, **settings) as stack:
        context = stack.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT, "compression": EXACT}).json()
        before = asked(stack, context["id"])[0]
        server.client().delete(keys.snapshot(context["id"]))
        fresh(stack)
        assert asked(stack, context["id"]) == (before, "recomputed; missing")
        counted = of_worker(stack)
        assert counted['precis_archive_failures_total{"operation": "get"}'] >= 1
        wait_for(lambda: of_worker(stack)['precis_archive_failures_total{"operation": "put"}'] >= 1, 60)
