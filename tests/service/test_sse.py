"""Streams clean up however they end, and keep the line open while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from precis.wire.messages import TokenEvent
from service import sse
from service.events import Subscription, events_of


async def run(frames: AsyncIterator[bytes], disconnect_after: float | None) -> tuple[bytes, int]:
    """Body sent, and how often the stream was closed."""
    closed, sent = 0, b""

    async def close() -> None:
        nonlocal closed
        closed += 1

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60 if disconnect_after is None else disconnect_after)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    await sse.Stream(frames, close)({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    return sent, closed


async def slow(seconds: float) -> AsyncIterator[bytes]:
    await asyncio.sleep(seconds)
    yield sse.frame("1", "token")


async def test_a_stream_that_ends_is_closed_once() -> None:
    assert await run(slow(0), None) == (b"event: token\ndata: 1\n\n", 1)


async def test_a_client_that_goes_before_the_first_frame_still_closes_the_stream() -> None:
    assert await run(slow(30), 0.0) == (b"", 1)


async def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    sent, _ = await run(slow(0.18), None)
    assert sent.count(b": still here\n\n") >= 2
    assert sent.endswith(b"event: token\ndata: 1\n\n")


async def test_a_reader_of_many_events_can_be_stopped_at_any_moment() -> None:
    """Its queue is never empty, so that a cancellation always comes together with an event."""
    subscription = Subscription("q", "0-0")
    for index in range(200_000):
        subscription.queue.put_nowait((f"{index}-0", TokenEvent("x", [1])))

    async def read() -> int:
        n = 0
        async for _ in events_of(subscription, 10.0):
            n += 1
        return n

    for _ in range(50):
        task = asyncio.create_task(read())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
    assert subscription.queue.qsize() > 100_000
