"""The Python clients, blocking and not, against real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from service.client import AsyncClient, Client
from service.replies import ApiError
from tests.stack import ADMIN_KEY, Stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12
EASY = {"policy": "full", "codec": "raw16"}


@pytest.fixture(scope="module")
def client(guarded: Stack) -> Iterator[Client]:
    with Client(guarded.base_url, ADMIN_KEY) as client:
        yield client


def test_upload_ask_append_delete(client: Client) -> None:
    context = client.upload(DOCUMENT, name="fox", compression=EASY, ttl_s=600)
    assert (context.status, context.name, context.error) == ("ready", "fox", "")
    assert context.ratio is not None
    assert context.stored_bytes > 0
    assert client.context(context.id) == context
    assert context in client.contexts()
    answer = client.ask(context.id, "Who jumps?", max_tokens=8)
    assert answer.cached_tokens == context.n_tokens
    assert (answer.completion_tokens, answer.finish_reason) == (8, "length")
    assert "".join(client.ask_stream(context.id, "Who jumps?", max_tokens=8)) == answer.text
    both = client.ask_all(context.id, ["Who jumps?", ""], max_tokens=8)
    assert both[0] is not None
    assert both[0].text == answer.text
    assert both[1] is None
    session = client.session(context.id)
    assert client.ask(context.id, "Who?", session=session, max_tokens=4).text
    assert client.append(context.id, "And more.").n_tokens > context.n_tokens
    assert client.delete(context.id) > 0
    with pytest.raises(ApiError, match="there is no context") as caught:
        client.context(context.id)
    assert (caught.value.status, caught.value.code) == (404, "context_not_found")


def test_files_and_failures(client: Client) -> None:
    context = client.upload(b"<html><body><p>A page about foxes.</p></body></html>", name="fox.html", compression=EASY)
    assert context.raw["source"]["kind"] == "html"
    with pytest.raises(ApiError) as caught:
        client.upload("")
    assert caught.value.code == "empty_document"
    with pytest.raises(ApiError, match="always kept"):
        client.upload(DOCUMENT + "x", compression={"policy": "snapkv", "max_bytes": 2000, "codec": "int8"})
    with pytest.raises(ApiError, match="is `precis up` running"):
        Client("http://127.0.0.1:9").contexts()
    with pytest.raises(ApiError) as caught:
        list(client.ask_stream("ctx_none", "Who?"))
    assert caught.value.status == 404


async def test_the_same_without_blocking(guarded: Stack) -> None:
    async with AsyncClient(guarded.base_url, ADMIN_KEY) as client:
        one, other = await asyncio.gather(
            client.upload(DOCUMENT + "one", compression=EASY), client.upload(DOCUMENT + "other", compression=EASY)
        )
        assert one.id != other.id
        assert await client.context(one.id) == one
        assert {one.id, other.id} <= {context.id for context in await client.contexts()}
        questions = [client.ask(one.id, f"Who jumps {n}?", max_tokens=8) for n in range(6)]
        texts = [answer.text for answer in await asyncio.gather(*questions)]
        pieces = [piece async for piece in client.ask_stream(one.id, "Who jumps 3?", max_tokens=8)]
        assert "".join(pieces) == texts[3]
        answers = await client.ask_all(one.id, ["Who jumps 3?"], max_tokens=8)
        assert answers[0] is not None
        assert answers[0].text == texts[3]
        session = await client.session(one.id)
        assert (await client.ask(one.id, "Who?", session=session, max_tokens=2)).text is not None
        assert (await client.append(one.id, "More.")).n_tokens > one.n_tokens
        assert await client.delete(one.id) > 0
        with pytest.raises(ApiError, match="there is no context"):
            await client.ask(one.id, "Who?")
        with pytest.raises(ApiError, match="there is no context"):
            [piece async for piece in client.ask_stream(one.id, "Who?")]
