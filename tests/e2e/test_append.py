"""A context grows: what is new is read on top of what is stored, and it is asked like the document read at once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from precis.wire import keys
from tests.stack import Stack, running_server, running_stack, wait_for

FIRST = "The quick brown fox jumps over the lazy dog. " * 12
MORE = "The slow red hen sits under the busy bee. " * 6
EXACT = {"policy": "full", "codec": "raw16"}


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_QUOTA_BYTES="5000000") as stack:
        yield stack


def upload(own: Stack, text: str, how: dict[str, Any] = EXACT, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": how, **fields}
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json=body).json()
    assert found["status"] == "ready", found
    return found


def append(own: Stack, context: dict[str, Any], text: str, wait: int = 60) -> httpx.Response:
    return own.http().post(f"/v1/contexts/{context['id']}/append?wait={wait}", json={"text": text})


def ask(own: Stack, context: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"question": "Who sits under whom?", "max_tokens": 16, **fields}
    return own.http().post(f"/v1/contexts/{context['id']}/queries", json=body)


def reused(own: Stack, how: str) -> float:
    port = re.findall(r"metrics=(\d+)", own.log("worker"))[-1]
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = re.search(rf'precis_reused_total{{how="{how}"}} ([\d.]+)', text)
    return float(found[1]) if found else 0.0


def test_it_answers_like_the_same_messages_read_at_once_and_only_the_new_is_read(own: Stack) -> None:
    context, before = upload(own, FIRST), reused(own, "grown")
    time.sleep(1.5)
    answered = append(own, context, MORE)
    grown = answered.json()
    assert (answered.status_code, grown["status"], grown["id"]) == (200, "ready", context["id"])
    assert reused(own, "grown") == before + 1
    assert grown["timings"]["queue_ms"] < 1000
    messages = [{"role": "user", "content": FIRST}, {"role": "user", "content": MORE}]
    at_once = own.http().post("/v1/contexts?wait=60", json={"messages": messages, "compression": EXACT}).json()
    assert at_once["id"] == grown["id"]  # the same document by the same policy
    assert grown["usage"]["total_tokens"] > context["usage"]["total_tokens"]
    assert grown["fidelity"] is None
    first = ask(own, grown).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == grown["usage"]["total_tokens"]
    own.http().delete(f"/v1/contexts/{grown['id']}")
    at_once = own.http().post("/v1/contexts?wait=60", json={"messages": messages, "compression": EXACT}).json()
    assert at_once["usage"] == grown["usage"]
    assert ask(own, at_once).json()["text"] == first["text"]


def test_it_grows_again_and_survives_its_worker(own: Stack) -> None:
    context = upload(own, FIRST + "Twice.")
    for text in (MORE, MORE + "And again."):
        assert append(own, context, text).json()["status"] == "ready"
    answer = ask(own, context).json()["text"]
    own.kill("worker")
    own.start_worker()
    found = ask(own, context)
    assert found.headers["x-cache"] == "hit; store"
    assert found.json()["text"] == answer
    shown = "".join(text for text, _ in own.http().get(f"/v1/contexts/{context['id']}/retention").json()["tokens"])
    assert shown.startswith(FIRST)
    assert MORE + "And again." in shown


def test_what_evicts_is_read_as_a_whole(own: Stack) -> None:
    how = {"policy": "snapkv", "keep_ratio": 0.5}
    context, before = upload(own, FIRST + "Evicted.", how), reused(own, "grown")
    grown = append(own, context, MORE).json()
    assert (grown["status"], reused(own, "grown")) == ("ready", before)
    assert grown["fidelity"] is not None
    assert abs(grown["storage"]["kept_ratio"] - 0.5) < 0.02


def test_raw_contexts_grow_by_text_as_it_is(own: Stack) -> None:
    context = upload(own, "Once upon", template="raw")
    grown = append(own, context, " a time").json()
    whole = upload(own, "Once upon a time there", template="raw")
    body = {"prompt": " there", "max_tokens": 8}
    one = own.http().post(f"/v1/contexts/{grown['id']}/queries", json=body).json()
    other = own.http().post(f"/v1/contexts/{whole['id']}/queries", json={"prompt": " ", "max_tokens": 8}).json()
    assert one["usage"]["prompt_tokens"] == len("Once upon a time there")
    assert {one["object"], other["object"]} == {"answer"}


def test_a_damaged_snapshot_is_read_as_a_whole(own: Stack) -> None:
    context = upload(own, FIRST + "Damaged.")
    client = own.server.client()
    piece = bytearray(client.hget(keys.snapshot(context["id"]), "1.0"))
    piece[3] ^= 1
    client.hset(keys.snapshot(context["id"]), "1.0", bytes(piece))
    grown = append(own, context, MORE).json()
    assert grown["status"] == "ready"
    assert grown["fidelity"] is not None
    assert "not_reused" in own.log("worker")


def test_what_cannot_be_appended_is_refused_and_changes_nothing(own: Stack) -> None:
    context = upload(own, FIRST + "Refused.")
    for text, status, code in (
        (" ", 422, "empty_document"),
        ("x" * 70_000, 413, "context_too_long"),
        ("x" * 14_000, 429, "quota_exceeded"),
    ):
        refused = append(own, context, text)
        assert (refused.status_code, refused.json()["code"]) == (status, code), refused.text
    assert append(own, {"id": "ctx_none"}, "x").status_code == 404
    assert own.http().get(f"/v1/contexts/{context['id']}").json() == context
    assert ask(own, context).status_code == 200


def test_while_it_grows_it_is_not_asked_and_two_do_not_grow_it_at_once(own: Stack) -> None:
    context = upload(own, FIRST + "At once.")
    found: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: found.append(append(own, context, MORE, wait=0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted({each.status_code for each in found}) in (
        [200, 409],
        [202, 409],
        [200, 202, 409],
        [200, 202],
        [202],
        [200],
    )
    wait_for(lambda: own.http().get(f"/v1/contexts/{context['id']}").json()["status"] == "ready", 30)
    n_grown = sum(each.status_code in (200, 202) for each in found)
    n_more = (
        own.http().get(f"/v1/contexts/{context['id']}").json()["usage"]["total_tokens"]
        - context["usage"]["total_tokens"]
    )
    one = append(own, upload(own, FIRST + "Alone."), MORE).json()["usage"]["total_tokens"]
    per_append = one - upload(own, FIRST + "Alone.")["usage"]["total_tokens"]
    assert n_more == n_grown * per_append
    usage = own.http().get("/v1/admin/tenants/default").json()["usage"]
    assert usage["active"] == 0
    total = sum(c["storage"]["stored_bytes"] for c in own.http().get("/v1/contexts?limit=200").json()["data"])
    assert usage["stored_bytes"] == total


def test_a_session_goes_on_after_its_context_has_grown(own: Stack) -> None:
    context = upload(own, FIRST + "Session.")
    session = own.http().post(f"/v1/contexts/{context['id']}/sessions").json()["id"]
    assert ask(own, context, session=session).status_code == 200
    append(own, context, MORE)
    again = ask(own, context, session=session, question="And now?")
    assert again.status_code == 200
    assert "fed_again" in own.log("worker")
