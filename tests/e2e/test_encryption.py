"""With a secret, nothing of a document or a conversation lies in the store in the clear; without it nothing is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precis.text import Prompter
from precis.wire import keys
from precis.wire.codec import decode
from precis.wire.messages import ModelCard
from tests.stack import Stack, running_server, running_stack

SECRET, OTHER = "a secret that is long enough for a test", "another secret that is long enough too!"
DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}


@pytest.fixture
def own(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_ENCRYPTION_KEYS=SECRET) as stack:
        yield stack


def upload(own: Stack) -> dict[str, Any]:
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT, "compression": EASY}).json()
    assert found["status"] == "ready", found
    return found


def ask(own: Stack, context: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"question": "Who jumps?", "max_tokens": 12, **fields}
    found: dict[str, Any] = own.http().post(f"/v1/contexts/{context['id']}/queries", json=body).json()
    return found


def all_values(own: Stack) -> bytes:
    """Whatever lies in the store, but for the streams of jobs and events, which are gone within minutes."""
    client, found = own.server.client(), []
    for key in client.keys("*"):
        kind = client.type(key)
        if kind == b"string":
            found.append(client.get(key))
        elif kind == b"hash":
            found += client.hvals(key)
    return b"\0".join(found)


def tokens_of(own: Stack) -> bytes:
    """The document's first sentence as it would lie in the store."""
    client = own.server.client()
    (name,) = client.smembers(keys.MODELS)
    prompter = Prompter(decode(client.hget(keys.model(name.decode()), "card"), ModelCard))
    return np.array(prompter.raw(DOCUMENT[:40], begins=False), "<i4").tobytes()


def test_nothing_lies_in_the_clear(own: Stack, tiny_folder: Path) -> None:
    context = upload(own)
    session = own.http().post(f"/v1/contexts/{context['id']}/sessions").json()["id"]
    first = ask(own, context, session=session)
    second = ask(own, context, session=session, question="Over whom?")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > context["usage"]["total_tokens"]
    said = {"input": DOCUMENT, "context": context["id"], "max_output_tokens": 4}
    assert own.http().post("/v1/responses", json=said).status_code == 200
    assert own.http().get(f"/v1/contexts/{context['id']}/retention").json()["tokens"]
    kept = all_values(own)
    assert b"lazy dog" not in kept
    assert tokens_of(own) not in kept
    own.kill("worker")
    own.start_worker()
    again = ask(own, context)
    assert again["text"] == first["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == context["usage"]["total_tokens"]


def test_the_same_without_a_secret_is_seen_so_that_the_test_above_can_fail(tiny_folder: Path) -> None:
    with running_server() as server, running_stack(server, tiny_folder) as stack:
        upload(stack)
        assert tokens_of(stack) in all_values(stack)


def test_another_secret_reads_nothing_and_a_list_of_both_reads_all(own: Stack) -> None:
    context = upload(own)
    first = ask(own, context)["text"]
    for secrets, works in ((OTHER, False), (f"{OTHER},{SECRET}", True), ("", False)):
        for name in ("worker", "api"):
            own.kill(name)
        own.environment["PRECIS_ENCRYPTION_KEYS"] = secrets
        own.start_api()
        own.start_worker()
        found = ask(own, context)
        assert (found.get("text") == first) is works, (secrets, found)
        if not works:
            assert found["code"] == "snapshot_corrupt"
            assert "PRECIS_ENCRYPTION_KEYS" in found["detail"]
