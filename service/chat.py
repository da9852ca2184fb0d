"""OpenAI's chat and text completions: the `openai` SDK works against them, streaming too.

A chat that begins like a stored context is answered on it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import InvalidRequest, PrecisError
from precis.wire.messages import DoneEvent, TokenLogprob
from service import metrics, sse
from service.access import CallerDep
from service.choosing import Choices, choose, done_of, schema_of, usage_of_all
from service.openai_schemas import ChatIn, CompletionIn
from service.problems import body_of
from service.prompts import Prompt, prompt_of
from service.queries import logprob_out, model_of
from service.state import StateDep

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/chat/completions")
async def complete_chat(wanted: ChatIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Complete a chat, on the context named by `context`, or else on the longest that the messages begin with."""
    messages = [message.plain() for message in wanted.messages]
    prompt = await prompt_of(state, caller, wanted.model, wanted.context, messages)
    choices = await choose(state, request, prompt, wanted, schema=schema_of(wanted.response_format))
    head = {**_head(choices, prompt), "id": f"chatcmpl-q_{choices.id}"}
    headers = {"x-cache": choices.cache, "x-context": prompt.context_id}
    if wanted.stream:
        head["object"] = "chat.completion.chunk"
        return sse.Stream(_chat_frames(choices, head, request.url.path, wanted.with_usage), choices.close, headers)
    found = await choices.collect(request)
    body = {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": _chat_logprobs(each.logprobs) if wanted.logprobs else None,
                "finish_reason": done_of(each).finish_reason,
            }
            for index, each in enumerate(found)
        ],
        "usage": usage_of_all([done_of(each) for each in found]),
    }
    return JSONResponse(body, headers=headers)


@router.post("/completions")
async def complete_text(wanted: CompletionIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Complete text as it is, alone or after a raw context."""
    if wanted.context is None:
        card = await state.fleet.card(wanted.model or None)
        prompter = await state.fleet.prompter(card)
        prompt = Prompt(card, None, prompter.raw(wanted.prompt, begins=True))
    else:
        record = await state.ready_context(wanted.context, caller.tenant)
        if record.template != "raw":
            raise InvalidRequest("text completions need a context with the raw template", param="context")
        card, prompter = await model_of(state, record)
        prompt = Prompt(card, record, prompter.raw(wanted.prompt, begins=False))
    if not prompt.token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    choices = await choose(state, request, prompt, wanted)
    head = {**_head(choices, prompt), "id": f"cmpl-q_{choices.id}", "object": "text_completion"}
    headers = {"x-cache": choices.cache, "x-context": prompt.context_id}
    if wanted.stream:
        return sse.Stream(_text_frames(choices, head, request.url.path, wanted.with_usage), choices.close, headers)
    found = await choices.collect(request)
    before = wanted.prompt if wanted.echo else ""
    body = {
        **head,
        "choices": [
            {
                "index": index,
                "text": before + each.text,
                "logprobs": _text_logprobs(each.logprobs) if wanted.logprobs is not None else None,
                "finish_reason": done_of(each).finish_reason,
            }
            for index, each in enumerate(found)
        ],
        "usage": usage_of_all([done_of(each) for each in found]),
    }
    return JSONResponse(body, headers=headers)


def _head(choices: Choices, prompt: Prompt) -> dict[str, Any]:
    """What every chunk of one completion has in common."""
    mark = prompt.card.digest if prompt.record is None else prompt.record.fingerprint
    return {"created": choices.created, "model": choices.model, "system_fingerprint": f"fp_{mark[:12]}"}


async def _chat_frames(choices: Choices, head: dict[str, Any], path: str, with_usage: bool) -> AsyncIterator[bytes]:
    """Chunks as OpenAI sends them: the role, deltas, the finish reason, usage if wanted, [DONE]."""
    unused = {"usage": None} if with_usage else {}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse.frame(json.dumps({**head, "choices": [choice], **unused}))

    for index in range(len(choices.asked)):
        yield chunk(index, {"role": "assistant", "content": ""})
    done: list[DoneEvent] = []
    try:
        async for index, event in choices.events():
            if isinstance(event, DoneEvent):
                done.append(event)
                yield chunk(index, {}, event.finish_reason)
            else:
                logprobs = _chat_logprobs(event.logprobs) if event.logprobs else None
                yield chunk(index, {"content": event.text}, logprobs=logprobs)
        if with_usage:
            yield sse.frame(json.dumps({**head, "choices": [], "usage": usage_of_all(done)}))
    except PrecisError as error:
        yield _error(error, path)
    yield sse.frame("[DONE]")


async def _text_frames(choices: Choices, head: dict[str, Any], path: str, with_usage: bool) -> AsyncIterator[bytes]:
    """The same for text completions."""
    done: list[DoneEvent] = []
    try:
        async for index, event in choices.events():
            ended = isinstance(event, DoneEvent)
            choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            if isinstance(event, DoneEvent):
                done.append(event)
                choice["finish_reason"] = event.finish_reason
            else:
                choice["text"] = event.text
                choice["logprobs"] = _text_logprobs(event.logprobs) if event.logprobs else None
            if ended or choice["text"]:
                yield sse.frame(json.dumps({**head, "choices": [choice], **({"usage": None} if with_usage else {})}))
        if with_usage:
            yield sse.frame(json.dumps({**head, "choices": [], "usage": usage_of_all(done)}))
    except PrecisError as error:
        yield _error(error, path)
    yield sse.frame("[DONE]")


def _error(error: PrecisError, path: str) -> bytes:
    metrics.ERRORS.labels(error.code).inc()
    return sse.frame(json.dumps(body_of(error, path)))


def _chat_logprobs(found: list[TokenLogprob]) -> dict[str, Any]:
    return {"content": [logprob_out(each) for each in found], "refusal": None}


def _text_logprobs(found: list[TokenLogprob]) -> dict[str, Any]:
    starts, at = [], 0
    for each in found:
        starts.append(at)
        at += len(each.token)
    return {
        "tokens": [each.token for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [{token: logprob for token, _, logprob in each.top} for each in found],
        "text_offset": starts,
    }
