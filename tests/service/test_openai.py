"""OpenAI's routes through its own SDK: contexts found by their beginning, several choices, schemas, text."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from precis.wire import keys
from precis.wire.messages import Message
from service.beginnings import digests_of
from tests.stack import Stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "snapkv", "keep_ratio": 0.5}
WHO = {"role": "user", "content": "Who jumps?"}


def upload(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = stack.http().post("/v1/contexts?wait=60", json={"compression": EASY, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def chat(sdk: openai.OpenAI, model: str, messages: list[Any], **options: Any) -> tuple[Any, str, str]:
    """The completion, and the context and cache that it tells."""
    asked = {"temperature": 0, "max_tokens": 8, **options}
    raw = sdk.chat.completions.with_raw_response.create(model=model, messages=messages, **asked)
    return raw.parse(), raw.headers["x-context"], raw.headers["x-cache"]


def test_a_chat_that_begins_like_a_context_is_answered_on_it(stack: Stack, sdk: openai.OpenAI, model: str) -> None:
    document = {"role": "user", "content": DOCUMENT + "beginning"}
    alone, context_id, cache = chat(sdk, model, [document, WHO])
    assert (context_id, cache, alone.usage.prompt_tokens_details.cached_tokens) == ("", "miss", 0)
    context = upload(stack, text=document["content"])
    found, context_id, cache = chat(sdk, model, [document, WHO])
    assert context_id == context["id"]
    assert cache.startswith("hit")
    assert found.usage.prompt_tokens_details.cached_tokens == context["usage"]["total_tokens"]
    assert found.usage.prompt_tokens == alone.usage.prompt_tokens  # the same tokens, whoever read them
    named, _, _ = chat(sdk, model, [WHO], extra_body={"context": context["id"]})
    assert named.choices[0].message.content == found.choices[0].message.content
    for other in ([{**document, "content": document["content"] + "!"}, WHO], [document], [WHO, document]):
        assert chat(sdk, model, other)[1] == ""
    stack.http().delete(f"/v1/contexts/{context['id']}")
    assert chat(sdk, model, [document, WHO])[1] == ""
    digest = digests_of([Message("user", document["content"])])[-1]
    assert not stack.server.client().exists(keys.beginning("default", model, digest))


def test_the_longest_beginning_wins_and_the_newest_of_equals(stack: Stack, sdk: openai.OpenAI, model: str) -> None:
    first = {"role": "user", "content": DOCUMENT + "longest"}
    more = [first, {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Over whom?"}]
    short = upload(stack, messages=[first])
    assert chat(sdk, model, [*more])[1] == short["id"]
    longer = upload(stack, messages=more)
    assert chat(sdk, model, [*more, {"role": "assistant", "content": "A dog."}, WHO])[1] == longer["id"]
    assert chat(sdk, model, [first, WHO])[1] == short["id"]
    newer = upload(stack, messages=[first], compression={"policy": "streaming", "keep_ratio": 0.5})
    assert chat(sdk, model, [first, WHO])[1] == newer["id"]


def test_a_prompt_alone_is_answered_as_transformers_would(sdk: openai.OpenAI, stack: Stack, model: str) -> None:
    """The same tokens as a raw context of everything but the last: the answer cannot depend on who read them."""
    text = DOCUMENT + "alone"
    whole = sdk.completions.create(model=model, prompt=text + " And", temperature=0, max_tokens=8)
    context = upload(stack, text=text, template="raw", compression={"policy": "full", "codec": "raw16"})
    on_it = sdk.completions.create(
        model=model, prompt=" And", temperature=0, max_tokens=8, extra_body={"context": context["id"]}
    )
    assert whole.choices[0].text == on_it.choices[0].text
    assert on_it.usage is not None
    assert whole.usage is not None
    assert on_it.usage.prompt_tokens == whole.usage.prompt_tokens
    assert on_it.usage.prompt_tokens_details is not None
    assert on_it.usage.prompt_tokens_details.cached_tokens == context["usage"]["total_tokens"]
    chat_context = upload(stack, text=text)
    with pytest.raises(openai.UnprocessableEntityError, match="raw template"):
        sdk.completions.create(model=model, prompt="x", extra_body={"context": chat_context["id"]})


def test_text_completions_stream_echo_and_tell_logprobs(sdk: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "The fox", "temperature": 0, "max_tokens": 6}
    whole = sdk.completions.create(**asked, logprobs=2)
    chunks = list(sdk.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].text for each in chunks if each.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == 6
    assert sdk.completions.create(**asked, echo=True).choices[0].text == "The fox" + whole.choices[0].text


def test_several_choices_of_one_prompt(sdk: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 8}
    found, _, _ = chat(sdk, model, [WHO], **asked)
    texts = [choice.message.content for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    again, _, _ = chat(sdk, model, [WHO], **asked)
    assert [choice.message.content for choice in again.choices] == texts
    one, _, _ = chat(sdk, model, [WHO], **{**asked, "n": 1})
    assert one.choices[0].message.content == texts[0]
    assert found.usage.completion_tokens > one.usage.completion_tokens
    assert found.usage.prompt_tokens == one.usage.prompt_tokens
    streamed = ["", "", ""]
    chunks: Any = sdk.chat.completions.create(model=model, messages=[WHO], stream=True, **asked)  # type: ignore[list-item]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_an_answer_fits_the_schema_that_was_asked_for(sdk: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "dog"]}, "jumps": {"type": "boolean"}},
        "required": ["animal", "jumps"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    for seed in range(4):
        found, _, _ = chat(sdk, model, [WHO], response_format=wanted, temperature=1.0, seed=seed, max_tokens=200)
        assert found.choices[0].finish_reason == "stop"
        told = json.loads(found.choices[0].message.content)
        assert told["animal"] in ("fox", "dog")
        assert isinstance(told["jumps"], bool)
    loose, _, _ = chat(sdk, model, [WHO], response_format={"type": "json_object"}, max_tokens=3)
    assert loose.choices[0].message.content.lstrip().startswith("{")
    with pytest.raises(openai.UnprocessableEntityError, match="schema cannot be used"):
        chat(sdk, model, [WHO], response_format={"type": "json_schema", "json_schema": {"schema": {"type": 7}}})
    with pytest.raises(openai.UnprocessableEntityError, match="response_format"):
        chat(sdk, model, [WHO], response_format={"type": "yaml"})


def test_digests_tell_messages_apart() -> None:
    one = digests_of([Message("user", "ab"), Message("user", "c")])
    assert one[0] == digests_of([Message("user", "ab")])[0]
    others = ([Message("user", "a"), Message("user", "bc")], [Message("user", "ab"), Message("system", "c")])
    assert all(digests_of(list(other))[1] != one[1] for other in others)
