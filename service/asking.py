"""What all answer routes share: hand a job to a worker, follow its events, and stop it when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from precis.errors import ContextTooLong, InvalidRequest, JobCancelled, PrecisError, QueryTooLong, from_code
from precis.wire.messages import (
    AnswerJob,
    CacheEvent,
    DoneEvent,
    Event,
    FailedEvent,
    ModelCard,
    ScoredEvent,
    ScoreJob,
    Timings,
    TokenEvent,
    TokenLogprob,
)
from precis.wire.records import ContextRecord
from service.events import Subscription, events_of
from service.state import State

_T = TypeVar("_T")


@dataclass(slots=True)
class Asked:
    """A job that a worker has taken up.

    Attributes:
        cache: what is said in the header `x-cache`.
        events: those that follow the first.
    """

    state: State
    job_id: str
    subscription: Subscription
    cache: str
    cached_tokens: int
    events: AsyncIterator[tuple[str, Event]]
    ended: bool = False

    async def rest(self) -> AsyncIterator[TokenEvent | DoneEvent]:
        """Token events, then one done event.

        Raises:
            PrecisError: if the worker failed.
        """
        async for _, event in self.events:
            if isinstance(event, FailedEvent):
                self.ended = True
                raise from_code(event.code, event.detail)
            if isinstance(event, DoneEvent):
                self.ended = True
            if isinstance(event, (TokenEvent, DoneEvent)):
                yield event

    async def close(self) -> None:
        """Stop following; an answer that has not ended is cancelled."""
        self.state.follower.unfollow(self.subscription)
        if not self.ended:
            await self.state.jobs.cancel(self.job_id)


@dataclass(slots=True)
class Collected:
    """A whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: DoneEvent | None = None


async def begin(state: State, request: Request, model: str, job: AnswerJob) -> Asked:
    """Queue an answer and wait until a worker has its snapshot.

    Raises:
        QueueFull, NoWorker: if nobody can take it.
        PrecisError: whatever the worker found before the first token.
    """
    workers = await state.fleet.need_worker(model, job="answer")
    subscription = await state.follower.follow(job.id)
    events = events_of(subscription, state.settings.answer_timeout_s)
    asked = Asked(state, job.id, subscription, "", 0, events)
    try:
        await state.jobs.submit(job, model, workers)
        _, first = await unless_gone(request, anext(events))
        if isinstance(first, FailedEvent):
            asked.ended = True
            raise from_code(first.code, first.detail)  # noqa: TRY301 — closed like any other failure
        if isinstance(first, CacheEvent):
            asked.cache, asked.cached_tokens = first.cache, first.cached_tokens
    except BaseException:
        await asked.close()
        raise
    return asked


async def collect(request: Request, asked: Asked) -> Collected:
    """The whole answer, or nothing of it if the client goes."""
    found = Collected()

    async def read() -> None:
        async for event in asked.rest():
            if isinstance(event, DoneEvent):
                found.done = event
            else:
                found.text += event.text
                found.token_ids += event.token_ids
                found.logprobs += event.logprobs

    try:
        await unless_gone(request, read())
    finally:
        await asked.close()
    return found


def done_of(found: Collected) -> DoneEvent:
    """How an answer ended.

    Raises:
        InvalidRequest: if it did not.
    """
    if found.done is None:
        raise InvalidRequest("the answer ended early")
    return found.done


async def scored(state: State, request: Request, record: ContextRecord, job: ScoreJob) -> ScoredEvent:
    """Have items scored.

    Raises:
        PrecisError: as in `begin`.
    """
    workers = await state.fleet.need_worker(record.model, job="answer")
    subscription = await state.follower.follow(job.id)
    ended = False
    try:
        await state.jobs.submit(job, record.model, workers)
        events = events_of(subscription, state.settings.answer_timeout_s)
        _, event = await unless_gone(request, anext(events))
        ended = True
        if isinstance(event, ScoredEvent):
            return event
        raise from_code(getattr(event, "code", "internal_error"), getattr(event, "detail", "scoring failed"))
    finally:
        state.follower.unfollow(subscription)
        if not ended:
            await state.jobs.cancel(job.id)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The work's result, unless the client hangs up first: then the work is cancelled.

    Raises:
        JobCancelled: if the client has gone.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise JobCancelled("the client has gone")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def together(card: ModelCard, records: list[ContextRecord]) -> int:
    """Tokens of contexts that are read one behind the other.

    Raises:
        ContextTooLong: if the model does not read so much.
    """
    n_tokens = sum(record.n_tokens for record in records)
    if len(records) > 1 and n_tokens > card.max_context:
        raise ContextTooLong(
            f"the contexts have {n_tokens} tokens together, {card.name} takes {card.max_context}: ask fewer at once",
            limit=card.max_context,
            n_tokens=n_tokens,
        )
    return n_tokens


def check_room(card: ModelCard, n_context: int, n_query: int, max_tokens: int) -> int:
    """Tokens that the answer may have: what was asked for, or what the model has left.

    Raises:
        QueryTooLong: if the query leaves no room for an answer.
    """
    room = card.max_length - n_context - n_query
    if room < 1:
        limit = card.max_length - n_context - 1
        raise QueryTooLong(
            f"the query has {n_query} tokens; after a context of {n_context}, {card.name} has room for {limit}",
            limit=limit,
            n_tokens=n_query,
        )
    return min(max_tokens, room)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object; cached tokens are always said, also when there are none."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(done: DoneEvent) -> dict[str, Any]:
    """Usage of a finished answer."""
    return usage(done.prompt_tokens, done.completion_tokens, done.cached_tokens)


def timings_out(timings: Timings) -> dict[str, float]:
    """Timings as clients see them, milliseconds."""
    return {name: getattr(timings, name) for name in ("queue_ms", "load_ms", "prefill_ms", "decode_ms", "cache_n")}


def problem_of(error: PrecisError) -> dict[str, Any]:
    """An error inside a stream that has begun."""
    return {"code": error.code, "detail": error.detail}
