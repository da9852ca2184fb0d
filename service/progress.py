"""The route that follows a context's work as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import Response

from precis.errors import InvalidRequest, JobLost
from precis.wire import keys
from precis.wire.codec import decode_event
from precis.wire.messages import Event, FailedEvent, ProgressEvent, ReadyEvent
from precis.wire.records import ContextRecord
from service import sse
from service.access import CallerDep
from service.events import Subscription, events_of
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts/{context_id}", tags=["contexts"])


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def context_events(
    context_id: str, state: StateDep, caller: CallerDep, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """Follow a context's work as server-sent events: queued, prefill, score, search, scored, tighten,
    storing, stored, ready or failed."""
    after = last_event_id or "0-0"
    if not all(part.isdigit() for part in after.split("-")) or after.count("-") > 1:
        raise InvalidRequest("Last-Event-ID must be an id that this stream sent")
    record = await state.records.get(context_id, caller.tenant)
    subscription = await state.follower.follow(record.id, after)

    async def close() -> None:
        state.follower.unfollow(subscription)

    return sse.Stream(_context_frames(state, record, subscription, after), close)


async def _context_frames(
    state: State, record: ContextRecord, subscription: Subscription, after: str
) -> AsyncIterator[bytes]:
    try:
        current = await state.records.find(record.id) or record
        if after == "0-0":
            yield sse.frame(json.dumps({"status": "queued", "total": record.n_tokens}), "queued")
        if current.status in ("ready", "failed"):
            async for found in _past(state, current, after):
                yield found
            return
        async for entry_id, event in events_of(subscription, state.settings.answer_timeout_s):
            for name, data in _named(event):
                yield sse.frame(json.dumps(data), name, entry_id)
    except JobLost as error:
        yield sse.frame(json.dumps({"code": error.code, "detail": error.detail}), "failed")


async def _past(state: State, record: ContextRecord, after: str) -> AsyncIterator[bytes]:
    """What is left of a finished context's stream, closed by its end."""
    ended = False
    for raw_id, fields in await state.stores.queue.xrange(keys.events(record.id), f"({after}", "+"):
        event = decode_event(fields[b"event"])
        ended = ended or isinstance(event, (ReadyEvent, FailedEvent))
        for name, data in _named(event):
            yield sse.frame(json.dumps(data), name, raw_id.decode())
    if not ended:
        error = record.error
        end: Event = ReadyEvent() if error is None else FailedEvent(error.code, error.detail)
        for name, data in _named(end):
            yield sse.frame(json.dumps(data), name)


def _named(event: Event) -> list[tuple[str, dict[str, Any]]]:
    """Event names and data as clients see them."""
    match event:
        case ProgressEvent(stage="encode"):
            return [("scored", {"status": event.status})]
        case ProgressEvent():
            return [(event.stage, {"status": event.status, "processed": event.processed, "total": event.total})]
        case ReadyEvent():
            return [("stored", {"status": "storing"}), ("ready", {"status": "ready"})]
        case FailedEvent():
            return [("failed", {"status": "failed", "code": event.code, "detail": event.detail})]
    return []
