"""Clients of the API, one that blocks and one that does not; the command line uses the first.

client = Client("http://127.0.0.1:8000")
context = client.upload(Path("report.pdf").read_bytes(), name="report.pdf")
print(client.ask(context.id, "What is it about?").text)
for piece in client.ask_stream(context.id, "And in detail?"):
    print(piece, end="")
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx

from service import calls
from service.calls import Answer, Call, Context, T
from service.replies import ApiError, Events, ServerEvent, check, headers_of, pieces_of, unreachable

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT = httpx.Timeout(30, read=4000)


class Client:
    """Blocks until an answer is there."""

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        """`api_key` is by default what the environment has as PRECIS_API_KEY, or else as PRECIS_ADMIN_KEY."""
        self._base_url = base_url
        self._http = httpx.Client(base_url=base_url, headers=headers_of(api_key), timeout=_TIMEOUT)

    def __enter__(self) -> Client:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._http.close()

    def upload(self, document: str | bytes, *, name: str = "", **fields: Any) -> Context:
        """Upload a text, or the bytes of a file, and wait until it can be asked.

        Args:
            document: text; or PDF, DOCX, HTML, Markdown or text as bytes.
            name: to remember it by.
            fields: further ones of `POST /v1/contexts`: compression, ttl_s, pinned, instructions, overflow, ...

        Raises:
            ApiError: with the server's own words.
        """
        return _ready(self.run(calls.upload(document, name=name, **fields)))

    def append(self, context_id: str, text: str) -> Context:
        """Let a context grow, and wait until it can be asked again."""
        return _ready(self.run(calls.append(context_id, text)))

    def context(self, context_id: str) -> Context:
        """One context."""
        return self.run(calls.context(context_id))

    def contexts(self, limit: int = 50, after: str | None = None) -> list[Context]:
        """The newest contexts."""
        return self.run(calls.contexts(limit, after))

    def delete(self, context_id: str) -> int:
        """Take a context away; bytes that were freed."""
        return self.run(calls.delete(context_id))

    def ask(self, context_id: str, question: str | None, **fields: Any) -> Answer:
        """Ask a question; further fields as `POST /v1/contexts/{id}/queries` has them."""
        return self.run(calls.ask(context_id, question, **fields))

    def ask_all(self, context_id: str, questions: Sequence[str], **fields: Any) -> list[Answer | None]:
        """Ask many questions at once; None where one failed."""
        return self.run(calls.ask_all(context_id, questions, **fields))

    def ask_stream(self, context_id: str, question: str | None, **fields: Any) -> Iterator[str]:
        """Ask, and have the answer in pieces as it comes.

        Raises:
            ApiError: also if the answer breaks off.
        """
        call = calls.ask(context_id, question, stream=True, **fields)
        for event in self.stream(call.method, call.path, **call.options):
            yield from pieces_of(event)

    def session(self, context_id: str) -> str:
        """Begin a conversation: ask with its id as `session`."""
        return self.run(calls.session(context_id))

    def run(self, call: Call[T]) -> T:
        """One request, read."""
        return call.read(self.call(call.method, call.path, **call.options))

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One request of any kind.

        Raises:
            ApiError: with the server's own words.
        """
        response = self._sent(method, path, **options)
        check(response)
        body: dict[str, Any] = response.json()
        return body

    def patient(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """One request's status and body, whatever they are; a server that is full is asked again when it says so.

        Raises:
            ApiError: if the server cannot be reached.
        """
        while True:
            response = self._sent(method, path, **options)
            wait = response.headers.get("retry-after", "")
            if response.status_code not in (429, 503) or not wait.isdigit():
                body: dict[str, Any] = response.json()
                return response.status_code, body
            time.sleep(int(wait))

    def download(self, path: str) -> Iterator[bytes]:
        """The bytes of one response, as they come.

        Raises:
            ApiError: with the server's own words, or if they end early.
        """
        try:
            with self._http.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                check(response)
                yield from response.iter_bytes()
        except httpx.HTTPError as error:
            raise unreachable(self._base_url, error) from error

    def stream(self, method: str, path: str, **options: Any) -> Iterator[ServerEvent]:
        """Server-sent events of one request, until the server ends them.

        Raises:
            ApiError: with the server's own words.
        """
        events = Events()
        try:
            with self._http.stream(method, path, **options) as response:
                if response.is_error:
                    response.read()
                check(response)
                for line in response.iter_lines():
                    yield from events.line(line)
        except httpx.HTTPError as error:
            raise unreachable(self._base_url, error) from error

    def _sent(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise unreachable(self._base_url, error) from error


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        """See `Client`."""
        self._base_url = base_url
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers_of(api_key), timeout=_TIMEOUT)

    async def __aenter__(self) -> AsyncClient:
        """For `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def upload(self, document: str | bytes, *, name: str = "", **fields: Any) -> Context:
        """See `Client.upload`."""
        return _ready(await self.run(calls.upload(document, name=name, **fields)))

    async def append(self, context_id: str, text: str) -> Context:
        """See `Client.append`."""
        return _ready(await self.run(calls.append(context_id, text)))

    async def context(self, context_id: str) -> Context:
        """One context."""
        return await self.run(calls.context(context_id))

    async def contexts(self, limit: int = 50, after: str | None = None) -> list[Context]:
        """The newest contexts."""
        return await self.run(calls.contexts(limit, after))

    async def delete(self, context_id: str) -> int:
        """Take a context away; bytes that were freed."""
        return await self.run(calls.delete(context_id))

    async def ask(self, context_id: str, question: str | None, **fields: Any) -> Answer:
        """Ask a question."""
        return await self.run(calls.ask(context_id, question, **fields))

    async def ask_all(self, context_id: str, questions: Sequence[str], **fields: Any) -> list[Answer | None]:
        """Ask many questions at once; None where one failed."""
        return await self.run(calls.ask_all(context_id, questions, **fields))

    async def ask_stream(self, context_id: str, question: str | None, **fields: Any) -> AsyncIterator[str]:
        """See `Client.ask_stream`."""
        call, events = calls.ask(context_id, question, stream=True, **fields), Events()
        try:
            async with self._http.stream(call.method, call.path, **call.options) as response:
                if response.is_error:
                    await response.aread()
                check(response)
                async for line in response.aiter_lines():
                    for event in events.line(line):
                        for piece in pieces_of(event):
                            yield piece
        except httpx.HTTPError as error:
            raise unreachable(self._base_url, error) from error

    async def session(self, context_id: str) -> str:
        """Begin a conversation: ask with its id as `session`."""
        return await self.run(calls.session(context_id))

    async def run(self, call: Call[T]) -> T:
        """One request, read.

        Raises:
            ApiError: with the server's own words.
        """
        try:
            response = await self._http.request(call.method, call.path, **call.options)
        except httpx.HTTPError as error:
            raise unreachable(self._base_url, error) from error
        check(response)
        return call.read(response.json())


def _ready(context: Context) -> Context:
    if context.status != "ready":
        raise ApiError(context.error or f"the context is {context.status}")
    return context
