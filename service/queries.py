"""Routes that ask a context: queries (JSON or server-sent events) and scores."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import InvalidRequest, PrecisError
from precis.text import Prompter
from precis.wire.messages import (
    AnswerJob,
    DoneEvent,
    Message,
    Sampling,
    ScoreItem,
    ScoreJob,
    TokenLogprob,
)
from precis.wire.records import ContextRecord, SessionState
from service import metrics, sse
from service.access import CallerDep
from service.asking import (
    Asked,
    begin,
    check_room,
    collect,
    done_of,
    problem_of,
    scored,
    timings_out,
    together,
    usage,
    usage_of,
)
from service.contexts import int32_bytes
from service.models import model_of
from service.parts import surest
from service.schemas import QueryIn, ScoreIn
from service.sessions import begin_turn, end_turn
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts/{context_id}", tags=["queries"])
_DEFAULT_MAX_TOKENS = 256


@router.post("/queries", responses=sse.MAYBE)
async def ask(context_id: str, wanted: QueryIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Answer a question on top of a context's snapshot, alone or as the next turn of a session."""
    records = await state.ready_contexts([context_id, *wanted.also], caller.tenant)
    record = records[0]
    if any(each.parts for each in records):
        return await _of_split(records, wanted, request, state)
    before = None if wanted.session is None else await begin_turn(state, wanted.session, record)

    async def over() -> None:
        if wanted.session is not None:
            await end_turn(state, wanted.session)

    try:
        asked = await _begun(records, wanted, request, state, before)
        headers = {"x-cache": asked.cache}
        if wanted.stream:

            async def close() -> None:
                await asked.close()
                await over()

            return sse.Stream(_frames(asked), close, headers)
        body = await _body(record, wanted, request, asked)
    except BaseException:
        await over()
        raise
    await over()
    return JSONResponse(body, headers=headers)


async def _of_split(records: list[ContextRecord], wanted: QueryIn, request: Request, state: State) -> Response:
    """The answer of a document that was split; a stream has it in one piece, since all parts must have answered."""
    if len(records) > 1 or wanted.session is not None:
        raise InvalidRequest(
            "a document that was split is asked alone and without a session: leave also and session out"
        )
    body = await whole_answer(records[0], wanted, request, state)
    headers = {"x-cache": str(body.pop("cache"))}
    if not wanted.stream:
        return JSONResponse(body, headers=headers)
    shown = {name: body[name] for name in ("text", "logprobs") if name in body}
    ended = {name: body[name] for name in ("finish_reason", "usage", "timings", "part", "parts")}

    async def frames() -> AsyncIterator[bytes]:
        yield sse.frame(json.dumps(shown), "token")
        yield sse.frame(json.dumps(ended), "done")

    async def nothing() -> None:
        """All has ended already."""

    return sse.Stream(frames(), nothing, headers)


async def whole_answer(record: ContextRecord, wanted: QueryIn, request: Request, state: State) -> dict[str, Any]:
    """The answer to a question that stands alone, as clients see it.

    Of a document that was split, each part is asked, and the answer that the model was surest of is given.

    Raises:
        PrecisError: whatever went wrong.
    """
    if record.parts:
        parts = [record, *await state.ready_contexts(record.parts, record.tenant)]
        alone = [msgspec.structs.replace(part, parts=[]) for part in parts]
        sure = wanted.model_copy(update={"logprobs": True})
        tasks = [asyncio.create_task(whole_answer(part, sure, request, state)) for part in alone]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return surest(record.id, list(found), with_logprobs=wanted.logprobs)
    asked = await _begun([record], wanted, request, state)
    return {**await _body(record, wanted, request, asked), "cache": asked.cache}


async def _begun(
    records: list[ContextRecord], wanted: QueryIn, request: Request, state: State, before: SessionState | None = None
) -> Asked:
    """A question that a worker has taken up, after what its session said `before`."""
    record = records[0]
    card, prompter = await model_of(state, record)
    roles, n_context = tuple(records[-1].roles), together(card, records)
    if before is not None:
        roles, n_context = (*roles, *before.roles), n_context + before.n_fed + (before.pending >= 0)
    token_ids = query_tokens(prompter, record, wanted, roles)
    if before is not None and before.turns and roles:  # the end of the answer before was never fed
        token_ids = [*prompter.closing(roles), *token_ids]
    max_tokens = check_room(card, n_context, len(token_ids), wanted.max_tokens or _DEFAULT_MAX_TOKENS)
    job = _job(records, wanted, state, token_ids, max_tokens)
    if before is not None:
        said = [] if record.template == "raw" else [*(m.role for m in _messages(wanted)), "assistant"]
        session = wanted.session or ""
        job = msgspec.structs.replace(job, session=session, turn=before.turns, session_roles=[*before.roles, *said])
    return await begin(state, request, record.model, job)


async def _body(record: ContextRecord, wanted: QueryIn, request: Request, asked: Asked) -> dict[str, Any]:
    found = await collect(request, asked)
    body: dict[str, Any] = {
        "id": asked.job_id,
        "object": "answer",
        "context": record.id,
        **({"also": wanted.also} if wanted.also else {}),
        "model": record.model,
        "text": found.text,
        **_end(done_of(found)),
    }
    if wanted.logprobs:
        body["logprobs"] = [logprob_out(each) for each in found.logprobs]
    return body


def _job(
    records: list[ContextRecord], wanted: QueryIn, state: State, token_ids: list[int], max_tokens: int
) -> AnswerJob:
    view, trim = wanted.wanted_view, wanted.wanted_trim
    return AnswerJob(
        id=f"q_{uuid.uuid4().hex[:20]}",
        context_id=records[0].id,
        also=[record.id for record in records[1:]],
        token_ids=int32_bytes(token_ids),
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=wanted.stops,
            n_top=wanted.top_logprobs if wanted.logprobs else 0,
            logprobs=wanted.logprobs,
            ignore_eos=wanted.ignore_eos,
        ),
        api=state.follower.api_id,
        sent_at=time.time(),
        view_budget=view.budget if view else 0,
        view=view.kind if view else "sage",
        view_slides=view.slide if view else False,
        trim_budget=trim.budget if trim else 0,
        trim=trim.kind if trim else "gkv",
    )


def query_tokens(prompter: Prompter, record: ContextRecord, wanted: QueryIn, roles: tuple[str, ...]) -> list[int]:
    """The query part, at least one token.

    Raises:
        InvalidRequest: if the query does not fit the context's template, or is empty.
    """
    if (record.template == "raw") != (wanted.prompt is not None):
        fields = "prompt" if record.template == "raw" else "question or messages"
        raise InvalidRequest(f"this context has the {record.template} template: give {fields}")
    if wanted.prompt is not None:
        tokens = prompter.raw(wanted.prompt, begins=False)
    else:
        messages = _messages(wanted)
        if not any(m.content.strip() for m in messages):
            raise InvalidRequest("the question is empty")
        tokens = prompter.query_part(roles, messages)
    if not tokens:
        raise InvalidRequest("the query is empty")
    return tokens


def _messages(wanted: QueryIn) -> list[Message]:
    return [m.plain() for m in wanted.messages or []] or [Message("user", wanted.question or "")]


async def _frames(asked: Asked) -> AsyncIterator[bytes]:
    """`token` events, then `done`, or `error`."""
    try:
        async for event in asked.rest():
            if isinstance(event, DoneEvent):
                yield sse.frame(json.dumps(_end(event)), "done")
            else:
                data: dict[str, Any] = {"text": event.text}
                if event.logprobs:
                    data["logprobs"] = [logprob_out(each) for each in event.logprobs]
                yield sse.frame(json.dumps(data), "token")
    except PrecisError as error:
        metrics.ERRORS.labels(error.code).inc()
        yield sse.frame(json.dumps(problem_of(error)), "error")


def _end(done: DoneEvent) -> dict[str, Any]:
    return {"finish_reason": done.finish_reason, "usage": usage_of(done), "timings": timings_out(done.timings)}


def logprob_out(found: TokenLogprob) -> dict[str, Any]:
    """One token's log-probability as OpenAI shows it."""
    return {
        "token": found.token,
        "bytes": list(found.token.encode()),
        "logprob": found.logprob,
        "top_logprobs": [
            {"token": token, "bytes": list(token.encode()), "logprob": logprob} for token, _, logprob in found.top
        ],
    }


@router.post("/score")
async def score(context_id: str, wanted: ScoreIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Log-probabilities of continuations on the compressed cache."""
    record = await state.ready_context(context_id, caller.tenant)
    card, prompter = await model_of(state, record)
    items = []
    n_tokens = 0
    for item in wanted.items:
        prompt = prompter.raw(item.prompt, begins=False)
        continuation = prompter.raw(item.continuation, begins=False)
        if not prompt or not continuation:
            raise InvalidRequest("prompt and continuation need at least one token each")
        check_room(card, record.n_tokens, len(prompt) + len(continuation), 1)
        n_tokens += len(prompt) + len(continuation)
        items.append(ScoreItem(int32_bytes(prompt), int32_bytes(continuation)))
    job = ScoreJob(f"s_{uuid.uuid4().hex[:20]}", record.id, items, state.follower.api_id, time.time())
    event = await scored(state, request, record, job)
    cached = event.timings.cache_n
    body = {
        "object": "score",
        "context": record.id,
        "model": record.model,
        "items": [{"tokens": i.tokens, "logprobs": i.logprobs, "greedy": i.greedy} for i in event.items],
        "usage": usage(record.n_tokens + n_tokens, 0, cached),
        "timings": timings_out(event.timings),
    }
    return JSONResponse(body, headers={"x-cache": event.cache})
