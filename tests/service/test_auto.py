"""Beginnings that come twice become contexts by themselves, if that is wanted; raw prompts find raw contexts."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from precis.wire import keys
from tests.stack import Stack, running_server, running_stack, wait_for

LONG = "The quick brown fox jumps over the lazy dog. " * 30
OTHER = "The slow red hen sits under the busy bee. " * 30
EXACT = {"policy": "full", "codec": "raw16"}


@pytest.fixture(autouse=True)
def emptied(stack: Stack) -> None:
    for context in stack.http().get("/v1/contexts?limit=200").json()["data"]:
        stack.http().delete(f"/v1/contexts/{context['id']}")
    for key in stack.server.client().keys("*seen*"):
        stack.server.client().delete(key)


def chat(stack: Stack, messages: list[str], **fields: Any) -> httpx.Response:
    roles = ("user", "assistant")
    told = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    found = stack.http().post("/v1/chat/completions", json={"messages": told, "max_tokens": 4, **fields})
    assert found.status_code == 200, found.text
    return found


def contexts(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.http().get("/v1/contexts").json()["data"]
    return found


def cached(found: httpx.Response) -> int:
    n: int = found.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def test_the_second_time_a_beginning_is_stored_and_the_third_time_it_is_used(stack: Stack) -> None:
    first = chat(stack, [LONG, "Yes.", "Who jumps?"], cache="auto")
    assert first.headers["x-cache"] == "miss; seen once"
    assert contexts(stack) == []
    second = chat(stack, [LONG, "Yes.", "Over whom?"], cache="auto")
    assert second.headers["x-cache"] == "miss; being stored"
    (made,) = contexts(stack)
    assert (made["name"], made["metadata"]) == ("auto", {"cache": "auto"})
    wait_for(lambda: contexts(stack)[0]["status"] == "ready", 60)
    third = chat(stack, [LONG, "Yes.", "Who jumps?"], cache="auto")
    assert third.headers["x-cache"].startswith("hit")
    assert third.headers["x-context"] == made["id"]
    assert cached(third) == made["usage"]["total_tokens"]
    assert len(contexts(stack)) == 1
    soon = time.time() + 100
    record = stack.server.client()
    record.hset(keys.context(made["id"]), "expire_at", str(soon))
    chat(stack, [LONG, "Yes.", "Who?"])
    assert float(record.hget(keys.context(made["id"]), "expire_at")) > soon + 3000


def test_a_growing_chat_stores_the_longest_beginning_that_came_before(stack: Stack) -> None:
    turns = [OTHER]
    for said in ("Who sits?", "Under whom?"):
        chat(stack, [*turns, "Yes.", said], cache="auto")
        turns += ["Yes.", said]
    (made,) = contexts(stack)
    assert made["usage"]["total_tokens"] < len(OTHER) + 100
    assert made["usage"]["total_tokens"] > len(OTHER)


@pytest.mark.parametrize("cache", [None, "off"])
def test_nothing_is_stored_unasked(stack: Stack, cache: str | None) -> None:
    for _ in range(3):
        found = chat(stack, [LONG, "Yes.", "Who?"], **({"cache": cache} if cache else {}))
        assert found.headers["x-cache"] == "miss"
    assert contexts(stack) == []


def test_short_beginnings_and_last_messages_are_not_stored(stack: Stack) -> None:
    for _ in range(3):
        assert chat(stack, ["short", "Yes.", "Who?"], cache="auto").headers["x-cache"] == "miss"
        assert chat(stack, [LONG], cache="auto").headers["x-cache"] == "miss"
    assert contexts(stack) == []


def test_a_server_can_do_so_by_default_and_says_when_it_cannot(stack: Stack) -> None:
    environment = {"PRECIS_AUTO_CACHE": "true", "PRECIS_QUOTA_BYTES": "1000"}
    with running_server() as server, running_stack(server, stack.model, **environment) as own:
        chat(own, [LONG, "Yes.", "Who?"])
        assert chat(own, [LONG, "Yes.", "Who?"]).headers["x-cache"] == "miss; not stored, quota_exceeded"
        assert chat(own, [LONG, "Yes.", "Who?"], cache="off").headers["x-cache"] == "miss"
        assert contexts(own) == []


def test_raw_prompts_find_the_longest_raw_context_that_they_begin_with(stack: Stack) -> None:
    made = []
    for text in (LONG[:100], LONG[:200], OTHER[:200]):
        body = {"text": text, "template": "raw", "compression": EXACT}
        made.append(stack.http().post("/v1/contexts?wait=60", json=body).json())
        assert made[-1]["status"] == "ready"

    def complete(prompt: str) -> httpx.Response:
        return stack.http().post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})

    found = complete(LONG[:230])
    assert found.headers["x-context"] == made[1]["id"]
    assert cached(found) == made[1]["usage"]["total_tokens"] == 200
    assert found.json()["usage"]["prompt_tokens"] == 230
    named = {"prompt": LONG[200:230], "context": made[1]["id"], "max_tokens": 4, "temperature": 0}
    assert stack.http().post("/v1/completions", json=named).json()["choices"] == found.json()["choices"]
    assert complete(LONG[:150]).headers["x-context"] == made[0]["id"]
    assert complete(LONG[:100]).headers["x-context"] == ""  # something has to follow
    assert complete(LONG[:90] + "!" * 40).headers["x-context"] == ""
    assert complete("short").headers["x-context"] == ""
