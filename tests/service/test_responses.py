"""OpenAI's responses through its own SDK, and batches of questions over one context."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.service.test_api import frames
from tests.stack import Stack, wait_for

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}


@pytest.fixture(scope="module")
def context(stack: Stack) -> dict[str, Any]:
    body = {"text": DOCUMENT + "responses", "compression": EASY}
    found: dict[str, Any] = stack.http().post("/v1/contexts?wait=60", json=body).json()
    assert found["status"] == "ready"
    return found


def test_a_response_follows_the_one_before(sdk: openai.OpenAI, model: str, context: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 8}
    first = sdk.responses.create(input="Who jumps?", extra_body={"context": context["id"]}, **asked)
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == context["usage"]["total_tokens"]
    second = sdk.responses.create(input="And then?", previous_response_id=first.id, **asked)
    messages: list[Any] = [
        {"role": "user", "content": "Who jumps?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    same = sdk.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=8, extra_body={"context": context["id"]}
    )
    assert second.output_text == same.choices[0].message.content
    assert sdk.responses.retrieve(second.id).output_text == second.output_text
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        sdk.responses.retrieve(first.id)
    assert sdk.responses.create(input="More", previous_response_id=second.id, **asked).status in (
        "completed",
        "incomplete",
    )
    unstored = sdk.responses.create(input="Who?", store=False, **asked)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(input="And?", previous_response_id=unstored.id, **asked)


def test_a_response_finds_its_context_by_its_beginning(sdk: openai.OpenAI, model: str, context: dict[str, Any]) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": DOCUMENT + "responses"}]},
        {"role": "user", "content": "Who jumps?"},
    ]
    found = sdk.responses.create(model=model, input=items, max_output_tokens=4)
    assert found.usage is not None
    assert found.usage.input_tokens_details.cached_tokens == context["usage"]["total_tokens"]


def test_a_streamed_response_is_the_whole_one(sdk: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Who jumps?", "temperature": 0, "max_output_tokens": 8}
    whole = sdk.responses.create(**asked)
    events = list(sdk.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_response_fits_its_schema(sdk: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    found = sdk.responses.create(model=model, input="How many?", text=text, temperature=0, max_output_tokens=60)
    told = found.output_text
    assert told.startswith("{")
    if found.status == "completed":
        assert isinstance(json.loads(told)["n"], int)


def batch(stack: Stack, context: dict[str, Any], **body: Any) -> httpx.Response:
    return stack.http().post(f"/v1/contexts/{context['id']}/batch", json={"max_tokens": 8, **body})


def test_a_batch_answers_like_one_by_one(stack: Stack, context: dict[str, Any]) -> None:
    questions = [f"Question {index}?" for index in range(40)]
    found = batch(stack, context, questions=questions).json()["data"]
    assert [answer["index"] for answer in found] == list(range(40))
    url = f"/v1/contexts/{context['id']}/queries"
    for index in (0, 17, 39):
        alone = stack.http().post(url, json={"question": questions[index], "max_tokens": 8}).json()
        assert found[index]["text"] == alone["text"]
        assert found[index]["usage"] == alone["usage"]
    streamed = frames(batch(stack, context, questions=questions[:9], stream=True))
    assert sorted(data["index"] for name, data in streamed if name == "answer") == list(range(9))
    assert {data["index"]: data["text"] for name, data in streamed if name == "answer"} == {
        index: found[index]["text"] for index in range(9)
    }
    assert streamed[-1] == ("done", {"answers": 9})


def test_a_question_that_fails_does_not_stop_the_others(stack: Stack, context: dict[str, Any]) -> None:
    found = batch(stack, context, questions=["Who?", "x" * 70_000, "  ", "Whom?"]).json()["data"]
    assert [("error" in answer, answer.get("error", {}).get("code")) for answer in found] == [
        (False, None),
        (True, "query_too_long"),
        (True, "invalid_request"),
        (False, None),
    ]
    assert batch(stack, context, questions=[]).status_code == 422


def test_a_batch_nobody_reads_any_more_frees_its_places(stack: Stack, context: dict[str, Any]) -> None:
    body = {"questions": [f"Question {index}?" for index in range(30)], "max_tokens": 20_000, "stream": True}
    with stack.http().stream("POST", f"/v1/contexts/{context['id']}/batch", json=body) as response:
        assert response.status_code == 200
    wait_for(lambda: stack.http().get("/v1/workers").json()["data"][0]["load"] == 0)
    wait_for(lambda: stack.http().get("/v1/queues").json()["data"][0]["answers"] == 0)
