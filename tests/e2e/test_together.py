"""Several contexts asked at once, and documents that were split because the model does not read so much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precis.text import Prompter
from tests.stack import Stack, running_server, running_stack
from tests.tiny import save_tiny
from tests.words import card

FOX = "The quick brown fox jumps over the lazy dog. " * 8
HEN = "The slow red hen sits under the busy bee. " * 8
EXACT = {"policy": "full", "codec": "raw16"}
LENGTH = 1024


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("short")
    save_tiny(folder, max_position_embeddings=LENGTH)
    with running_server() as server, running_stack(server, folder) as stack:
        yield stack


def upload(own: Stack, text: str, how: dict[str, Any] = EXACT, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": how, **fields}
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json=body).json()
    assert found["status"] == "ready", found
    return found


def ask(own: Stack, context: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"question": "Who sits?", "max_tokens": 12, **fields}
    return own.http().post(f"/v1/contexts/{context['id']}/queries", json=body)


def test_several_are_one_behind_the_other_and_held_like_one(own: Stack) -> None:
    fox, hen = upload(own, FOX[:300]), upload(own, HEN[:300])
    first = ask(own, fox, also=[hen["id"]])
    assert first.status_code == 200, first.text
    n_both = fox["usage"]["total_tokens"] + hen["usage"]["total_tokens"]
    usage = first.json()["usage"]
    assert usage["prompt_tokens"] > n_both
    assert usage["prompt_tokens_details"]["cached_tokens"] == n_both - 16  # read again behind the first
    again = ask(own, fox, also=[hen["id"]])
    assert again.json()["text"] == first.json()["text"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == n_both
    assert again.headers["x-cache"] == "hit; memory"
    assert first.json()["also"] == [hen["id"]]
    other_order = ask(own, hen, also=[fox["id"]]).json()
    assert other_order["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    own.kill("worker")
    own.start_worker()
    loaded = ask(own, fox, also=[hen["id"]])
    assert loaded.headers["x-cache"] == "hit; store"
    assert loaded.json()["text"] == first.json()["text"]


def test_openais_clients_name_several(own: Stack) -> None:
    fox, hen = upload(own, FOX[:300]), upload(own, HEN[:300])
    sdk = openai.OpenAI(base_url=own.base_url + "/v1", api_key="unused", max_retries=0)
    found = sdk.chat.completions.create(
        model=fox["model"],
        messages=[{"role": "user", "content": "Who sits?"}],
        max_tokens=12,
        temperature=0,
        extra_body={"context": [fox["id"], hen["id"]]},
    )
    assert found.choices[0].message.content == ask(own, fox, also=[hen["id"]]).json()["text"]


def test_what_cannot_be_asked_together_is_refused(own: Stack) -> None:
    fox, hen = upload(own, FOX), upload(own, HEN)
    raw = upload(own, "Once upon a time", template="raw")
    session = own.http().post(f"/v1/contexts/{fox['id']}/sessions").json()["id"]
    long = upload(own, FOX + "long" * 50)
    for fields, status, says in (
        ({"also": [fox["id"]]}, 422, "twice"),
        ({"also": ["ctx_none"]}, 404, "ctx_none"),
        ({"also": [raw["id"]]}, 422, "template"),
        ({"also": [hen["id"]], "session": session}, 422, "session"),
        ({"also": [hen["id"], long["id"]]}, 413, "together"),
    ):
        refused = ask(own, fox, **fields)
        assert refused.status_code == status, refused.text
        assert says in refused.json()["detail"]


def long_text() -> str:
    return "\n\n".join(f"Paragraph {n}. The number of paragraph {n} is {n * 37 % 1000}." for n in range(60))


def split(own: Stack, text: str = "", **fields: Any) -> dict[str, Any]:
    return upload(own, text or long_text(), overflow="split", **fields)


def test_a_document_that_is_too_long_is_refused_or_split_and_nothing_of_it_is_lost(own: Stack) -> None:
    refused = own.http().post("/v1/contexts", json={"text": long_text(), "compression": EXACT})
    assert (refused.status_code, refused.json()["code"]) == (413, "context_too_long")
    whole = split(own, name="long")
    parts = [own.http().get(f"/v1/contexts/{part}").json() for part in whole["parts"]]
    assert len(parts) >= 2
    assert all(part["status"] == "ready" and part["part_of"] == whole["id"] for part in parts)
    shown = []
    for context in (whole, *parts):
        told = own.http().get(f"/v1/contexts/{context['id']}/retention").json()["tokens"]
        shown.append("".join(text for text, _ in told))
    assert "".join(shown) == long_text()
    assert all(piece.startswith("Paragraph") for piece in shown)
    listed = [context["id"] for context in own.http().get("/v1/contexts").json()["data"]]
    assert whole["id"] in listed
    assert not set(whole["parts"]) & set(listed)
    assert split(own)["id"] == whole["id"]
    short = split(own, FOX)
    assert "parts" not in short


def test_all_parts_are_asked_and_the_surest_answers(own: Stack) -> None:
    whole = split(own)
    found = ask(own, whole, logprobs=True).json()
    alone = [ask(own, {"id": part["context"]}, logprobs=True).json() for part in found["parts"][1:]]
    means = [sum(each["logprob"] for each in one["logprobs"]) / len(one["logprobs"]) for one in alone]
    best = max(found["parts"], key=lambda part: part["mean_logprob"])
    assert found["part"] == best["context"]
    for part, mean in zip(found["parts"][1:], means, strict=True):
        assert abs(part["mean_logprob"] - mean) < 1e-3
    assert found["context"] == whole["id"]
    assert found["usage"]["completion_tokens"] >= sum(one["usage"]["completion_tokens"] for one in alone)
    events = ask(own, whole, stream=True).text
    assert json.dumps(found["text"])[1:-1] in events
    assert events.index("event: token") < events.index("event: done")
    body = {"questions": ["Who sits?", "Who jumps?"], "max_tokens": 12}
    batch = own.http().post(f"/v1/contexts/{whole['id']}/batch", json=body).json()
    assert batch["data"][0]["text"] == found["text"]
    assert "logprobs" not in batch["data"][0]


def test_what_a_split_document_cannot_do_is_said(own: Stack) -> None:
    whole = split(own)
    http, url = own.http(), f"/v1/contexts/{whole['id']}"
    chat = {"messages": [{"role": "user", "content": "Who?"}], "context": whole["id"]}
    assert "split" in http.post("/v1/chat/completions", json=chat).json()["error"]["message"]
    for refused in (
        http.post(f"{url}/append", json={"text": "More."}),
        http.patch(url, json={"compression": {"keep_ratio": 0.5}}),
        http.get(f"{url}/snapshot"),
        ask(own, whole, session=http.post(f"{url}/sessions").json()["id"]),
    ):
        assert refused.status_code == 422, refused.text
        assert "split" in refused.json()["detail"]
    messages = {"messages": [{"role": "user", "content": "x"}], "overflow": "split"}
    assert http.post("/v1/contexts", json=messages).status_code == 422


def test_parts_live_and_go_with_the_whole(own: Stack) -> None:
    whole = split(own, long_text() + "\n\nAnd an end.", ttl_s=1000)
    own.http().patch(f"/v1/contexts/{whole['id']}", json={"pinned": True})
    for part in whole["parts"]:
        assert own.http().get(f"/v1/contexts/{part}").json()["pinned"] is True
    assert own.http().delete(f"/v1/contexts/{whole['id']}").json()["freed_bytes"] > 0
    for part in (whole["id"], *whole["parts"]):
        assert own.http().get(f"/v1/contexts/{part}").status_code == 404
        assert own.server.client().exists(f"snapshot:{{{part}}}") == 0


def test_a_document_that_does_not_get_in_as_a_whole_leaves_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_position_embeddings=LENGTH)
    with running_server() as server, running_stack(server, tmp_path, PRECIS_QUOTA_CONTEXTS="2") as stack:
        body = {"text": long_text(), "overflow": "split", "compression": EXACT}
        refused = stack.http().post("/v1/contexts?wait=60", json=body)
        assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
        assert stack.http().get("/v1/admin/tenants/default").json()["usage"]["contexts"] == 0


@given(st.text(max_size=400), st.integers(5, 60))
def test_pieces_are_the_text_and_short_enough(text: str, most: int) -> None:
    prompter = Prompter(card("chatml"))
    pieces = prompter.pieces(text, most)
    assert "".join(pieces) == text
    assert all(len(prompter.raw(piece, begins=False)) <= most + 4 for piece in pieces)
