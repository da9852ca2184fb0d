"""Server-sent events: one frame per event, and a comment while nothing happens, so that proxies keep the line open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi.sse import EventSourceResponse, format_sse_event

KEEP_ALIVE_S = 10.0
_COMMENT = format_sse_event(comment="still here")


def frame(data: str, event: str | None = None, event_id: str | None = None) -> bytes:
    """One event as bytes; `data` is sent as it is."""
    return format_sse_event(data_str=data, event=event, id=event_id)


def respond(frames: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> EventSourceResponse:
    """A streaming response; errors before the first frame must have been raised already."""
    return EventSourceResponse(kept_alive(frames), headers=headers)


async def kept_alive(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The frames, with a comment whenever none came for a while. Ends the source when the client goes."""
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(frames))
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
        await frames.aclose()  # type: ignore[attr-defined]
