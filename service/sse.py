"""Server-sent events: one frame per event, and a comment while nothing happens, so that proxies keep the line open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.sse import EventSourceResponse, format_sse_event

KEEP_ALIVE_S = 10.0
MAYBE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # a route that streams if asked
_COMMENT = format_sse_event(comment="still here")


def frame(data: str, event: str | None = None, event_id: str | None = None) -> bytes:
    """One event as bytes; `data` is sent as it is."""
    return format_sse_event(data_str=data, event=event, id=event_id)


class Stream(EventSourceResponse):
    """A streaming response that cleans up however it ends, also when the client goes before the first frame.

    Errors before the first frame must have been raised already.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(_kept_alive(frames), headers=headers)
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._close())


async def _kept_alive(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The frames, with a comment whenever none came for a while. Ends the source when the client goes."""
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(frames))
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE_S)
            if not done:
                yield _COMMENT
                continue
            task, pending = pending, None
            try:
                yield task.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending


async def _next(frames: AsyncIterator[bytes]) -> bytes:
    return await anext(frames)
