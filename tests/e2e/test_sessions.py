"""Conversations: what was fed is stored after every turn, and goes on anywhere; in any doubt it is fed again."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from precis.wire import keys
from precis.wire.records import SessionState
from tests.stack import Stack, running_server, running_stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}
QUESTIONS = ["Who jumps?", "Over whom does it jump?", "And what is the colour?"]


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    with running_server() as server, running_stack(server, tiny_folder) as stack:
        yield stack


@pytest.fixture(scope="module")
def context(own: Stack) -> dict[str, Any]:
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT, "compression": EASY}).json()
    assert found["status"] == "ready"
    return found


def begin(own: Stack, context: dict[str, Any], **fields: Any) -> str:
    made = own.http().post(f"/v1/contexts/{context['id']}/sessions", json=fields)
    assert made.status_code == 201, made.text
    found: str = made.json()["id"]
    return found


def say(own: Stack, context: dict[str, Any], session: str | None, question: str, **fields: Any) -> httpx.Response:
    body = {"question": question, "session": session, "max_tokens": 10, **fields}
    return own.http().post(f"/v1/contexts/{context['id']}/queries", json=body)


def told(own: Stack, session: str) -> dict[str, Any]:
    found: dict[str, Any] = own.http().get(f"/v1/sessions/{session}").json()
    return found


def state_of(own: Stack, session: str) -> SessionState:
    return msgspec.msgpack.decode(own.server.client().get(keys.session(session)), type=SessionState)


def talk(own: Stack, context: dict[str, Any], session: str, questions: list[str]) -> list[str]:
    answers = []
    for question in questions:
        found = say(own, context, session, question)
        assert found.status_code == 200, found.text
        answers.append(found.json()["text"])
    return answers


def test_a_turn_goes_on_where_the_last_ended_and_nothing_is_read_again(own: Stack, context: dict[str, Any]) -> None:
    session = begin(own, context)
    first = say(own, context, session, QUESTIONS[0]).json()
    assert first["text"] == say(own, context, None, QUESTIONS[0]).json()["text"]
    assert told(own, session)["turns"] == 1
    n_tail = told(own, session)["tokens"]
    state = state_of(own, session)
    assert (state.roles, len(state.fed) // 4) == (["user", "assistant"], n_tail)
    second = say(own, context, session, QUESTIONS[1]).json()
    n_context = context["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == n_context + n_tail
    assert second["text"] != say(own, context, None, QUESTIONS[1]).json()["text"]  # it has heard the first turn
    after = state_of(own, session)
    assert after.fed.startswith(state.fed)  # as it was fed, never rendered again
    n_new = second["usage"]["prompt_tokens"] - n_context - n_tail
    assert len(after.fed) // 4 == n_tail + n_new + second["usage"]["completion_tokens"] - (after.pending >= 0)


def test_the_same_conversation_goes_on_on_another_worker_and_after_losing_its_delta(
    own: Stack, context: dict[str, Any]
) -> None:
    whole = begin(own, context)
    expected = talk(own, context, whole, QUESTIONS)
    moved, lost, damaged, streamed = (begin(own, context) for _ in range(4))
    for session in (moved, lost, damaged, streamed):
        assert talk(own, context, session, QUESTIONS[:1]) == expected[:1]
    own.kill("worker", signal.SIGTERM)
    own.start_worker("worker")
    assert talk(own, context, moved, QUESTIONS[1:]) == expected[1:]
    client = own.server.client()
    client.delete(keys.snapshot(keys.delta(lost, 0)))
    again = say(own, context, lost, QUESTIONS[1])
    assert again.json()["text"] == expected[1]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == context["usage"]["total_tokens"]
    assert talk(own, context, lost, QUESTIONS[2:]) == expected[2:]
    piece = bytearray(client.hget(keys.snapshot(keys.delta(damaged, 0)), "1.0"))
    piece[len(piece) // 2] ^= 1
    client.hset(keys.snapshot(keys.delta(damaged, 0)), "1.0", bytes(piece))
    assert talk(own, context, damaged, QUESTIONS[1:]) == expected[1:]
    (port,) = re.findall(r"metrics=(\d+)", own.log("worker"))[-1:]
    counted = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'precis_recomputed_total{reason="session"} 2.0' in counted
    response = say(own, context, streamed, QUESTIONS[1], stream=True)
    parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert "".join(part.get("text", "") for part in parts) == expected[1]
    assert told(own, streamed)["turns"] == 2


def test_a_delta_of_another_session_is_not_used(own: Stack, context: dict[str, Any]) -> None:
    one, other = begin(own, context), begin(own, context)
    talk(own, context, one, QUESTIONS[:1])
    talk(own, context, other, QUESTIONS[2:])
    expected = talk(own, context, one, QUESTIONS[1:2])
    own.server.client().copy(keys.snapshot(keys.delta(other, 0)), keys.snapshot(keys.delta(one, 0)), replace=True)
    after = say(own, context, one, QUESTIONS[2]).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == context["usage"]["total_tokens"]
    fresh = begin(own, context)
    assert talk(own, context, fresh, QUESTIONS) == [
        *talk(own, context, begin(own, context), QUESTIONS[:1]),
        *expected,
        after["text"],
    ]


def test_an_unfinished_turn_leaves_no_trace(own: Stack, context: dict[str, Any]) -> None:
    session = begin(own, context)
    talk(own, context, session, QUESTIONS[:1])
    before = state_of(own, session)
    url = f"/v1/contexts/{context['id']}/queries"
    body = {"question": "Go on", "session": session, "max_tokens": 30000, "ignore_eos": True, "stream": True}
    with own.http().stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        busy = say(own, context, session, QUESTIONS[1])
        assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
    wait_for(lambda: not own.server.client().exists(keys.turn(session)))
    assert state_of(own, session) == before
    expected = begin(own, context)
    assert talk(own, context, session, QUESTIONS[1:]) == talk(own, context, expected, QUESTIONS)[1:]


def test_two_turns_at_once_are_one_turn(own: Stack, context: dict[str, Any]) -> None:
    session, found = begin(own, context), []

    def ask() -> None:
        found.append(say(own, context, session, QUESTIONS[0], max_tokens=200, ignore_eos=True).status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(200) == told(own, session)["turns"] >= 1
    assert set(found) <= {200, 409}


def test_sessions_expire_and_go_with_their_context(own: Stack) -> None:
    made = own.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT + "going", "compression": EASY}).json()
    short, long = begin(own, made, ttl_s=1), begin(own, made)
    client, sizes = own.server.client(), []
    for turn, question in enumerate(QUESTIONS):
        talk(own, made, long, [question])
        sizes.append(client.memory_usage(keys.snapshot(keys.delta(long, turn)), samples=0))
        if turn == 0:
            client.pexpire(keys.snapshot(keys.delta(long, 0)), 50_000)  # the next turn lets it live on
    assert max(sizes) < 2 * min(sizes)  # each turn stores what it added
    for turn in range(len(QUESTIONS)):
        assert 86000_000 < client.pttl(keys.snapshot(keys.delta(long, turn))) <= 86400_000
    assert state_of(own, long).deltas[0][0] == 0
    assert sum(n for _, n in state_of(own, long).deltas) == told(own, long)["tokens"]
    time.sleep(1.2)
    gone = say(own, made, short, QUESTIONS[0])
    assert (gone.status_code, gone.json()["code"]) == (404, "session_not_found")
    own.http().delete(f"/v1/contexts/{made['id']}")
    assert [key for key in client.keys("*") if long.encode() in key and b"events" not in key] == []
    assert own.http().get(f"/v1/sessions/{long}").status_code == 404


def test_what_a_session_cannot_do_is_said(own: Stack, context: dict[str, Any]) -> None:
    session = begin(own, context)
    assert say(own, context, "ses_none", QUESTIONS[0]).status_code == 404
    assert say(own, context, session, QUESTIONS[0], trim="gkv").status_code == 422
    other = own.http().post("/v1/contexts?wait=60", json={"text": DOCUMENT + "other", "compression": EASY}).json()
    wrong = say(own, other, session, QUESTIONS[0])
    assert wrong.status_code == 422
    assert context["id"] in wrong.json()["detail"]
    assert own.http().delete(f"/v1/sessions/{session}").json()["deleted"] is True
    assert own.http().get(f"/v1/sessions/{session}").status_code == 404


def test_raw_contexts_have_sessions_too(own: Stack) -> None:
    body = {"text": DOCUMENT + "raw", "template": "raw", "compression": EASY}
    made = own.http().post("/v1/contexts?wait=60", json=body).json()
    session, url = begin(own, made), f"/v1/contexts/{made['id']}/queries"
    answers = [
        own.http().post(url, json={"prompt": text, "session": session, "max_tokens": 6}).json()
        for text in (" And", " So")
    ]
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > made["usage"]["total_tokens"]
    assert told(own, session)["turns"] == 2
