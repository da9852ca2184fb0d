"""Tools that are given when a context is asked: OpenAI's client reads calls, whole and in streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precis.errors import InvalidRequest
from precis.wire.messages import Message
from service.openai_schemas import ChatMessageIn
from service.tools import Held, NamedTool, ToolIn, Tools
from tests.stack import Stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


def tools(choice: Any = None) -> Tools:
    return Tools([ToolIn.model_validate(each) for each in (WEATHER, TIME)], choice)


@pytest.fixture(scope="module")
def context(stack: Stack) -> str:
    body = {"text": DOCUMENT, "compression": {"policy": "snapkv", "keep_ratio": 0.5}}
    found: str = stack.http().post("/v1/contexts?wait=60", json=body).json()["id"]
    return found


def complete(sdk: openai.OpenAI, model: str, context: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": "How is the weather in Oslo?"}])
    given_ = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 300,
        "tools": [WEATHER, TIME],
        **fields,
    }
    return sdk.chat.completions.create(**given_, extra_body={"context": context})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_is_one_of_its_schema(
    sdk: openai.OpenAI, model: str, context: str, choice: Any
) -> None:
    found = complete(sdk, model, context, tool_choice=choice).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    (call,) = found.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    if choice != "required":
        assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"town", "days"}
        assert arguments["town"] in ("Oslo", "Rome")
        assert 0 <= arguments["days"] <= 9
    chunks = list(complete(sdk, model, context, tool_choice=choice, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert [(delta.function.name, json.loads(delta.function.arguments)) for delta in deltas] == [
        (call.function.name, arguments)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_with_auto_text_stays_text_and_the_tools_were_told(sdk: openai.OpenAI, model: str, context: str) -> None:
    with_tools = complete(sdk, model, context, max_tokens=8)
    without = complete(sdk, model, context, max_tokens=8, tool_choice="none")
    assert with_tools.choices[0].finish_reason == "length"
    assert with_tools.choices[0].message.tool_calls is None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 300
    assert with_tools.usage.prompt_tokens_details.cached_tokens == without.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(complete(sdk, model, context, max_tokens=8, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == with_tools.choices[0].message.content


def test_a_conversation_with_calls_goes_on(sdk: openai.OpenAI, model: str, context: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "How is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Snow."},
    ]
    found = complete(sdk, model, context, messages=messages, max_tokens=4)
    assert found.choices[0].message.content is not None
    plain = [ChatMessageIn.model_validate(message).plain() for message in messages]
    assert plain[1] == Message("assistant", CALL)
    assert plain[2] == Message("user", "<tool_response>\nSnow.\n</tool_response>")


def test_what_cannot_be_called_is_refused(stack: Stack, sdk: openai.OpenAI, model: str, context: str) -> None:
    for fields in (
        {"tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tools": [], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
    ):
        with pytest.raises(openai.UnprocessableEntityError):
            complete(sdk, model, context, **fields)
    body = {"input": "x", "tools": [WEATHER]}
    refused = stack.http().post("/v1/responses", json=body)
    assert (refused.status_code, "chat/completions" in refused.json()["error"]["message"]) == (422, True)
    body = {"contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": []}]}
    assert stack.http().post(f"/v1beta/models/{model}:generateContent", json=body).status_code == 422


def test_calls_are_read_from_text_and_what_is_no_call_stays() -> None:
    text, (call,) = tools().read(f"Let me see. {CALL}")
    assert text == "Let me see."
    assert call["function"] == {"name": "weather", "arguments": '{"town": "Oslo"}'}
    assert len(tools().read(CALL + CALL)[1]) == 2
    assert tools().read(CALL.removesuffix("\n</tool_call>"))[1]
    for said in (
        "No call.",
        CALL.replace("weather", "unknown"),
        CALL.replace("{", "", 1),
        CALL.replace('{"town": "Oslo"}', '"Oslo"'),
        f"{CALL} <tool_call> broken",
    ):
        assert tools().read(said) == (said, [])
    assert tools("none").read(CALL) == (CALL, [])
    assert not tools("none")


def test_tools_are_told_before_the_first_question() -> None:
    told = tools().told([Message("system", "Be brief."), Message("user", "Who?"), Message("user", "When?")])
    assert [message.role for message in told] == ["system", "user", "user"]
    assert told[1].content.endswith("\nWho?")
    assert '"name": "weather"' in told[1].content
    assert told[2].content == "When?"
    assert tools().told([Message("system", "Be brief.")])[0].role == "user"
    assert tools("none").told([Message("user", "Who?")]) == [Message("user", "Who?")]
    with pytest.raises(InvalidRequest, match="not among"):
        tools(NamedTool.model_validate({"type": "function", "function": {"name": "none"}}))


@given(
    st.lists(st.sampled_from(["Hello ", "<tool", "_call>", "<tool_call>", CALL, "<", "x", "\n"]), max_size=8), st.data()
)
def test_a_stream_shows_what_the_whole_text_shows(pieces: list[str], draw: st.DataObject) -> None:
    whole, held, shown, at = "".join(pieces), Held(tools()), "", 0
    while at < len(whole):
        n = draw.draw(st.integers(1, 9))
        shown += held.push(whole[at : at + n])
        at += n
    rest, calls = held.finish()
    text, expected = tools().read(whole)
    assert [call["function"] for call in calls] == [call["function"] for call in expected]
    if not expected:
        assert shown + rest == whole == text
    else:
        assert whole.startswith(shown)
        assert "<tool_call>" not in shown
