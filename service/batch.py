"""The route that asks a context many questions at once, and sends answers as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from precis.errors import PrecisError, QueueFull
from precis.wire.records import ContextRecord
from service import metrics, sse
from service.access import CallerDep
from service.asking import problem_of, unless_gone
from service.queries import whole_answer
from service.schemas import QueryIn, SamplingIn, Strict, TrimIn, TrimKind, ViewIn, ViewKind
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts/{context_id}", tags=["queries"])
_AT_ONCE = 16  # of one batch, so that others' questions come in between
_MOST = 1000


class BatchIn(SamplingIn, Strict):
    """Questions with one setting."""

    questions: list[str] = Field(min_length=1, max_length=_MOST)
    view: ViewIn | ViewKind | None = None
    trim: TrimIn | TrimKind | None = None


@router.post("/batch", responses=sse.MAYBE)
async def ask_all(context_id: str, wanted: BatchIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Answer questions over one snapshot, which is read once for all that run together.

    With `stream`, an event `answer` for each as it ends, with its `index`; else all of them, in order. A question that
    fails has an `error` and does not stop the others.
    """
    record = await state.ready_context(context_id, caller.tenant)
    shared = wanted.model_dump(exclude={"questions", "stream"}, exclude_none=True)
    queries = [QueryIn.model_validate({**shared, "question": question}) for question in wanted.questions]
    answers = _answers(record, queries, request, state)
    if wanted.stream:
        return sse.Stream(_frames(answers), answers.aclose)
    found: list[dict[str, Any]] = []

    async def read() -> None:
        async for answer in answers:
            found.append(answer)

    try:
        await unless_gone(request, read())
    finally:
        await answers.aclose()
    return JSONResponse({"object": "list", "data": sorted(found, key=lambda answer: answer["index"])})


async def _answers(record: ContextRecord, queries: list[QueryIn], request: Request, state: State) -> Any:
    """Answers as they come; those that have not are cancelled when nobody wants them any more."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def answer(index: int, query: QueryIn) -> dict[str, Any]:
        async with slots:
            while True:
                try:
                    found = await whole_answer(record, query, request, state)
                    found.pop("cache")
                    return {"index": index, **found}
                except QueueFull as error:
                    await asyncio.sleep(float(str(error.extra.get("retry_after_s", 1))))
                except PrecisError as error:
                    metrics.ERRORS.labels(error.code).inc()
                    return {"index": index, "object": "answer", "error": problem_of(error)}

    tasks = [asyncio.create_task(answer(index, query)) for index, query in enumerate(queries)]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _frames(answers: Any) -> AsyncIterator[bytes]:
    n = 0
    async for answer in answers:
        n += 1
        yield sse.frame(json.dumps(answer), "answer")
    yield sse.frame(json.dumps({"answers": n}), "done")
