"""Streams clean up however they end, and keep the line open while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service import sse


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
