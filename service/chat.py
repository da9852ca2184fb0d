"""OpenAI's chat completions on top of a context: the `openai` SDK works against it, streaming too."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import InvalidRequest, PrecisError
from precis.wire.messages import AnswerJob, DoneEvent, Sampling, TokenLogprob
from precis.wire.records import ContextRecord
from service import metrics, sse
from service.access import CallerDep
from service.asking import Asked, begin, check_room, collect, usage_of
from service.contexts import int32_bytes
from service.problems import body_of
from service.queries import logprob_out, model_of
from service.schemas import ChatIn
from service.state import StateDep

router = APIRouter(prefix="/v1/chat", tags=["openai"])
_DEFAULT_MAX_TOKENS = 1024


@router.post("/completions")
async def complete(wanted: ChatIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Complete a chat whose beginning is the context named by `context`."""
    if not wanted.context:
        raise InvalidRequest("name a context: extra_body={'context': 'ctx_...'}", param="context")
    record = await state.ready_context(wanted.context, caller.tenant)
    if wanted.model and wanted.model != record.model:
        raise InvalidRequest(f"the context was made with {record.model}, not with {wanted.model}", param="model")
    if record.template == "raw":
        raise InvalidRequest("a raw context takes no chat: use its queries route", param="context")
    card, prompter = await model_of(state, record)
    token_ids = prompter.query_part(tuple(record.roles), [m.plain() for m in wanted.messages])
    asked_for = wanted.max_completion_tokens or wanted.max_tokens or _DEFAULT_MAX_TOKENS
    job = AnswerJob(
        id=f"q_{uuid.uuid4().hex[:20]}",
        context_id=record.id,
        token_ids=int32_bytes(token_ids),
        sampling=Sampling(
            max_tokens=check_room(card, record, len(token_ids), asked_for),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=wanted.stops,
            n_top=wanted.top_logprobs if wanted.logprobs else 0,
            logprobs=bool(wanted.logprobs),
        ),
        api=state.follower.api_id,
        sent_at=time.time(),
    )
    asked = await begin(state, request, record, job)
    head = _head(job, record)
    headers = {"x-cache": asked.cache}
    if wanted.stream:
        with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
        return sse.Stream(_frames(asked, head, request.url.path, with_usage), asked.close, headers)
    found = await collect(request, asked)
    if found.done is None:
        raise InvalidRequest("the answer ended early")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": found.text, "refusal": None},
        "logprobs": _logprobs(found.logprobs) if wanted.logprobs else None,
        "finish_reason": found.done.finish_reason,
    }
    body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage_of(found.done)}
    return JSONResponse(body, headers=headers)


def _head(job: AnswerJob, record: ContextRecord) -> dict[str, Any]:
    """What every chunk of one completion has in common."""
    return {
        "id": f"chatcmpl-{job.id}",
        "object": "chat.completion.chunk",
        "created": int(job.sent_at),
        "model": record.model,
        "system_fingerprint": f"fp_{record.fingerprint[:12]}",
    }


async def _frames(asked: Asked, head: dict[str, Any], path: str, with_usage: bool) -> AsyncIterator[bytes]:
    """Chunks as OpenAI sends them: the role, deltas, the finish reason, usage if wanted, [DONE]."""

    def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.frame(json.dumps({**head, "choices": [choice], **({"usage": None} if with_usage else {})}))

    try:
        yield chunk({"role": "assistant", "content": ""})
        async for event in asked.rest():
            if isinstance(event, DoneEvent):
                yield chunk({}, event.finish_reason)
                if with_usage:
                    yield sse.frame(json.dumps({**head, "choices": [], "usage": usage_of(event)}))
            else:
                yield chunk({"content": event.text}, logprobs=_logprobs(event.logprobs) if event.logprobs else None)
    except PrecisError as error:
        metrics.ERRORS.labels(error.code).inc()
        yield sse.frame(json.dumps(body_of(error, path)))
    yield sse.frame("[DONE]")


def _logprobs(found: list[TokenLogprob]) -> dict[str, Any]:
    return {"content": [logprob_out(each) for each in found], "refusal": None}
