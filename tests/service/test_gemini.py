"""Google's own client works: cached contents are contexts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from service.gemini_schemas import plain_schema
from tests.stack import Stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def google(stack: Stack) -> genai.Client:
    return genai.Client(api_key="unused", http_options=types.HttpOptions(base_url=stack.base_url, api_version="v1beta"))


@pytest.fixture(scope="module")
def name(google: genai.Client) -> str:
    (model,) = google.models.list()
    assert model.name is not None
    return model.name.removeprefix("models/")


@pytest.fixture(scope="module")
def cache(google: genai.Client, name: str) -> types.CachedContent:
    config = types.CreateCachedContentConfig(
        contents=[types.Content(role="user", parts=[types.Part(text=DOCUMENT)])],
        system_instruction="Answer in one word.",
        display_name="fox",
        ttl="7200s",
    )
    return google.caches.create(model=name, config=config)


def ask(google: genai.Client, name: str, cache: types.CachedContent | None = None, **config: Any) -> Any:
    how = types.GenerateContentConfig(**{"temperature": 0, "max_output_tokens": 12, **config})
    if cache is not None:
        how.cached_content = cache.name
    return google.models.generate_content(model=name, contents="Who jumps?", config=how)


def test_a_cached_content_is_a_context_with_a_time_to_live(
    stack: Stack, google: genai.Client, name: str, cache: types.CachedContent
) -> None:
    assert cache.name is not None
    ours = stack.http().get(f"/v1/contexts/{cache.name.removeprefix('cachedContents/')}").json()
    assert (ours["status"], ours["name"], ours["template"]) == ("ready", "fox", "chat")
    assert (cache.display_name, cache.model) == ("fox", f"models/{name}")
    assert cache.usage_metadata is not None
    assert cache.usage_metadata.total_token_count == ours["usage"]["total_tokens"]
    assert cache.expire_time is not None
    assert abs(cache.expire_time - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=2)
    assert google.caches.get(name=cache.name) == cache
    assert cache.name in [each.name for each in google.caches.list(config={"page_size": 1})]
    later = google.caches.update(name=cache.name, config=types.UpdateCachedContentConfig(ttl="86400s"))
    assert later.expire_time is not None
    assert later.expire_time > cache.expire_time


def test_it_answers_like_the_same_question_to_the_context(
    stack: Stack, google: genai.Client, name: str, cache: types.CachedContent
) -> None:
    found = ask(google, name, cache)
    context = str(cache.name).removeprefix("cachedContents/")
    body = {"question": "Who jumps?", "max_tokens": 12}
    ours = stack.http().post(f"/v1/contexts/{context}/queries", json=body).json()
    assert found.text == ours["text"]
    usage, said = found.usage_metadata, ours["usage"]
    assert usage.cached_content_token_count == said["prompt_tokens_details"]["cached_tokens"] > 100
    assert (usage.prompt_token_count, usage.candidates_token_count) == (
        said["prompt_tokens"],
        said["completion_tokens"],
    )
    assert found.candidates[0].finish_reason in (types.FinishReason.STOP, types.FinishReason.MAX_TOKENS)
    counted = google.models.count_tokens(model=name, contents="Who jumps?")
    alone = ask(google, name).usage_metadata
    assert (counted.total_tokens, alone.cached_content_token_count) == (alone.prompt_token_count, 0)


def test_streams_are_the_same_in_pieces(google: genai.Client, name: str, cache: types.CachedContent) -> None:
    how = types.GenerateContentConfig(temperature=0, max_output_tokens=12, cached_content=cache.name)
    chunks = list(google.models.generate_content_stream(model=name, contents="Who jumps?", config=how))
    assert "".join(chunk.text or "" for chunk in chunks) == ask(google, name, cache).text
    assert chunks[-1].candidates is not None
    assert chunks[-1].candidates[0].finish_reason is not None
    assert chunks[-1].usage_metadata is not None
    assert chunks[-1].usage_metadata.candidates_token_count
    assert all(chunk.usage_metadata is None for chunk in chunks[:-1])


def test_answers_fit_a_schema_and_choices_and_instructions_are_taken(
    google: genai.Client, name: str, cache: types.CachedContent
) -> None:
    schema = types.Schema(
        type=types.Type.OBJECT,
        properties={"who": types.Schema(type=types.Type.STRING, enum=["fox", "dog"])},
        required=["who"],
    )
    json_only = {"response_mime_type": "application/json", "response_schema": schema, "max_output_tokens": 200}
    found = json.loads(ask(google, name, cache, **json_only).text)
    assert found in ({"who": "fox"}, {"who": "dog"})
    two = ask(google, name, cache, candidate_count=2, seed=3, system_instruction="Be brief.")
    assert [each.index for each in two.candidates] == [0, None] or [each.index for each in two.candidates] == [0, 1]
    assert ask(google, name, cache, stop_sequences=[ask(google, name, cache).text[:3]]).text in (None, "")


def test_refusals_have_googles_shape(stack: Stack, google: genai.Client, name: str) -> None:
    gone = types.CachedContent(name="cachedContents/ctx_none")
    with pytest.raises(errors.ClientError) as caught:
        ask(google, name, gone)
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
    assert "ctx_none" in str(caught.value.message)
    for path, body, says in (
        (f"models/{name}:generateContent", {"contents": []}, "contents"),
        (f"models/{name}:generateContent", {"contents": [{"parts": [{"inlineData": {}}]}]}, "text"),
        ("cachedContents", {"model": name, "contents": [{"parts": [{"text": "x"}]}], "ttl": "soon"}, "ttl"),
        ("cachedContents", {"model": name, "contents": [{"parts": [{"text": " "}]}]}, "empty"),
        (
            "cachedContents",
            {"model": name, "contents": [{"parts": [{"text": "x"}]}], "expireTime": "2001-01-01T00:00:00Z"},
            "future",
        ),
    ):
        found = stack.http().post(f"/v1beta/{path}", json=body)
        error = found.json()["error"]
        assert (found.status_code, error["code"], error["status"]) == (422, 422, "INVALID_ARGUMENT"), found.text
        assert says in error["message"]
    for path in ("models/none:generateContent", f"models/{name}:embedContent"):
        found = stack.http().post(f"/v1beta/{path}", json={"contents": [{"parts": [{"text": "x"}]}]})
        assert (found.status_code, found.json()["error"]["status"]) == (404, "NOT_FOUND")
    unstreamed = stack.http().post(
        f"/v1beta/models/{name}:streamGenerateContent", json={"contents": [{"parts": [{"text": "x"}]}]}
    )
    assert "alt=sse" in unstreamed.json()["error"]["message"]


def test_deleted_is_deleted(google: genai.Client, name: str) -> None:
    config = types.CreateCachedContentConfig(contents=DOCUMENT + "Once more.")
    made = google.caches.create(model=name, config=config)
    google.caches.delete(name=str(made.name))
    with pytest.raises(errors.ClientError):
        google.caches.get(name=str(made.name))


def test_schemas_become_json_schemas() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True},
            "n": {"type": "ARRAY", "items": {"type": "NUMBER"}},
        },
        "propertyOrdering": ["type"],
    }
    assert plain_schema(given) == {
        "type": "object",
        "properties": {
            "type": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "n": {"type": "array", "items": {"type": "number"}},
        },
        "additionalProperties": False,
    }
