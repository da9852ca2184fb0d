"""Bugs that others had, tried on this (docs/reliability.md has the list; the rest of it is tested elsewhere)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from precis.wire import keys
from precis.wire.codec import decode_job, encode
from precis.wire.messages import AnswerJob, Sampling
from precis.wire.records import ContextRecord
from tests.stack import Stack, running_server, running_stack, wait_for

ROOT = Path(__file__).parents[2]
DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EXACT = {"policy": "full", "codec": "raw16"}


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_HOT_BYTES="2000000") as stack:
        yield stack


def upload(own: Stack, text: str, wait: int = 60, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": EXACT, **fields}
    found: dict[str, Any] = own.http().post(f"/v1/contexts?wait={wait}", json=body).json()
    return found


def ask(own: Stack, context: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"max_tokens": 12, **({} if "prompt" in fields else {"question": "Who?"}), **fields}
    return own.http().post(f"/v1/contexts/{context['id']}/queries", json=body)


def scraped(own: Stack, name: str) -> float:
    port = re.findall(r"metrics=(\d+)", own.log("worker"))[-1]
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? ([\d.e+]+)$", text, re.MULTILINE))


def test_an_idle_service_makes_a_lost_snapshot_again_at_once_and_answers_alike(own: Stack) -> None:
    context = upload(own, DOCUMENT)
    first = ask(own, context).json()["text"]
    own.kill("worker")
    own.start_worker()
    own.server.client().delete(keys.snapshot(context["id"]))
    time.sleep(1.5)  # idle: nobody else wakes the worker
    began = time.monotonic()
    again = ask(own, context)
    assert again.headers["x-cache"] == "recomputed; missing"
    assert again.json()["text"] == first
    assert time.monotonic() - began < 15
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_document_that_was_cancelled_is_whole_when_it_comes_again(own: Stack) -> None:
    long = DOCUMENT * 30
    whole = upload(own, long)
    answer = ask(own, whole).json()["text"]
    for delay in (0.0, 0.1, 0.3, 0.6):
        own.http().delete(f"/v1/contexts/{whole['id']}")
        begun = upload(own, long, wait=0)
        time.sleep(delay)
        own.http().delete(f"/v1/contexts/{begun['id']}")
        assert own.http().get(f"/v1/contexts/{begun['id']}").status_code == 404
        whole = upload(own, long)
        assert whole["status"] == "ready"
        assert ask(own, whole).json()["text"] == answer
    own.http().delete(f"/v1/contexts/{whole['id']}")
    wait_for(lambda: not own.server.client().keys("snapshot:*" + begun["id"] + "*"), 10)


def test_a_prompt_that_is_all_cached_still_reads_its_own_tokens_once(own: Stack) -> None:
    text = "Once upon a time there was a fox"
    raw = upload(own, text, template="raw")
    assert ask(own, raw, prompt="").json()["code"] == "invalid_request"
    tail = text[-4:]
    found = [ask(own, raw, prompt=tail).json() for _ in range(3)]
    assert {each["text"] for each in found} == {found[0]["text"]}
    assert found[0]["usage"]["prompt_tokens"] == len(text) + len(tail)
    whole = upload(own, text + tail[:-1], template="raw")
    assert ask(own, whole, prompt=tail[-1]).json()["text"] == found[0]["text"]


def test_a_snapshot_of_another_dtype_is_made_again(own: Stack) -> None:
    context = upload(own, DOCUMENT + "dtype")
    first = ask(own, context)
    own.kill("worker")
    own.start_worker(PRECIS_DTYPE="bfloat16")
    other = ask(own, context)
    assert other.status_code == 200
    assert other.headers["x-cache"] == "recomputed; stale"
    own.kill("worker")
    own.start_worker()
    again = ask(own, context)
    assert again.headers["x-cache"] == "recomputed; stale"
    assert again.json()["text"] == first.json()["text"]


def test_a_worker_holds_no_more_than_it_may(own: Stack) -> None:
    for number in range(8):
        context = upload(own, f"{number} " + DOCUMENT * 4)
        assert ask(own, context).status_code == 200
        assert 0 < scraped(own, "precis_hot_bytes") <= 2_000_000


def test_messages_of_other_versions_are_understood(own: Stack) -> None:
    """Workers and API processes of two versions run side by side while a cluster is upgraded."""
    job = AnswerJob("q_1", "ctx_1", b"\0\0\0\0", Sampling(), "api", 1.0)
    told = msgspec.msgpack.decode(encode(job))
    older = {name: told[name] for name in ("type", "id", "context_id", "token_ids", "sampling", "api", "sent_at")}
    assert decode_job(msgspec.msgpack.encode(older)) == job
    assert decode_job(msgspec.msgpack.encode({**told, "of_tomorrow": {"a": 1}})) == job
    context = upload(own, DOCUMENT + "versions")
    client, key = own.server.client(), keys.context(context["id"])
    client.hset(key, "of_tomorrow", "[1, 2]")
    known = {field.encode_name for field in msgspec.structs.fields(ContextRecord) if field.required}
    client.hdel(key, *{"queued_at", "parts", "part_of", "source", "beginning"} - known)
    assert ask(own, context).status_code == 200
    assert own.http().get(f"/v1/contexts/{context['id']}").json()["status"] == "ready"


def test_every_test_that_the_list_names_exists() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 28
    assert re.findall(r"^\| (B\d+) \|", text, re.MULTILINE) == [f"B{n}" for n in range(1, 31)]
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
