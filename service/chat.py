"""OpenAI's chat and text completions: the `openai` SDK works against them, streaming too.

A chat that begins like a stored context is answered on it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import InvalidRequest, PrecisError
from precis.wire.messages import DoneEvent, TokenEvent, TokenLogprob
from service import metrics, sse
from service.access import CallerDep
from service.asking import done_of
from service.choosing import Choices, choose, schema_of, usage_of_all
from service.openai_schemas import ChatIn, CompletionIn
from service.problems import body_of
from service.prompts import Chat, Prompt, prompt_of, raw_prompt_of
from service.queries import logprob_out
from service.state import StateDep
from service.tools import Held, Tools

router = APIRouter(prefix="/v1", tags=["openai"])
_Parts = list[tuple[dict[str, Any], str | None]]  # of a choice, with its finish reason
_Shown = Callable[[int, TokenEvent | DoneEvent], _Parts]


@router.post("/chat/completions", responses=sse.MAYBE)
async def complete_chat(wanted: ChatIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Complete a chat, on the context named by `context`, or else on the longest that the messages begin with."""
    messages, tools = [message.plain() for message in wanted.messages], Tools(wanted.tools or [], wanted.tool_choice)
    prompt = await prompt_of(state, caller, Chat(wanted.model, wanted.contexts, messages, wanted.cache, tools))
    schema = tools.schema() or schema_of(wanted.response_format)
    choices = await choose(state, request, prompt, wanted, schema=schema)
    head = {**_head(choices, prompt), "id": f"chatcmpl-q_{choices.id}"}
    headers = {"x-cache": choices.cache + prompt.note, "x-context": prompt.context_id}
    if wanted.stream:
        head["object"] = "chat.completion.chunk"
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        held = [Held(tools) for _ in choices.asked]
        shown = _chat_part if not tools else lambda index, event: _tool_parts(held[index], event)
        frames = _frames(choices, head, request.url.path, wanted.with_usage, opening, shown)
        return sse.Stream(frames, choices.close, headers)
    found = await choices.collect(request)
    read = [tools.read(each.text) for each in found]
    body = {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
                | ({"tool_calls": calls} if calls else {}),
                "logprobs": _chat_logprobs(each.logprobs) if wanted.logprobs else None,
                "finish_reason": "tool_calls" if calls else done_of(each).finish_reason,
            }
            for index, (each, (text, calls)) in enumerate(zip(found, read, strict=True))
        ],
        "usage": usage_of_all([done_of(each) for each in found]),
    }
    return JSONResponse(body, headers=headers)


@router.post("/completions", responses=sse.MAYBE)
async def complete_text(wanted: CompletionIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Complete text as it is, alone or after a raw context."""
    prompt = await raw_prompt_of(state, caller, wanted.model, wanted.contexts, wanted.prompt)
    if not prompt.token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    choices = await choose(state, request, prompt, wanted)
    head = {**_head(choices, prompt), "id": f"cmpl-q_{choices.id}", "object": "text_completion"}
    headers = {"x-cache": choices.cache + prompt.note, "x-context": prompt.context_id}
    if wanted.stream:
        frames = _frames(choices, head, request.url.path, wanted.with_usage, None, _text_part)
        return sse.Stream(frames, choices.close, headers)
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


async def _frames(
    choices: Choices, head: dict[str, Any], path: str, with_usage: bool, opening: dict[str, Any] | None, shown: _Shown
) -> AsyncIterator[bytes]:
    """Chunks as OpenAI sends them: an opening if there is one, parts, finish reasons, usage if wanted, [DONE].

    Args:
        choices: what is answered.
        head: of every chunk.
        path: of the route, whose errors look alike.
        with_usage: whether the last chunk tells it.
        opening: what every choice begins with, or None.
        shown: the parts of a choice that an event becomes.
    """
    unused = {"usage": None} if with_usage else {}

    def chunk(index: int, part: dict[str, Any], reason: str | None = None) -> bytes:
        return sse.frame(json.dumps({**head, "choices": [{"index": index, **part, "finish_reason": reason}], **unused}))

    for index in range(len(choices.asked) if opening is not None else 0):
        yield chunk(index, opening or {})
    done: list[DoneEvent] = []
    try:
        async for index, event in choices.events():
            if isinstance(event, DoneEvent):
                done.append(event)
            for part, reason in shown(index, event):
                yield chunk(index, part, reason)
        if with_usage:
            yield sse.frame(json.dumps({**head, "choices": [], "usage": usage_of_all(done)}))
    except PrecisError as error:
        metrics.ERRORS.labels(error.code).inc()
        yield sse.frame(json.dumps(body_of(error, path)))
    yield sse.frame("[DONE]")


def _chat_part(_index: int, event: TokenEvent | DoneEvent) -> _Parts:
    if isinstance(event, DoneEvent):
        return [({"delta": {}, "logprobs": None}, event.finish_reason)]
    logprobs = _chat_logprobs(event.logprobs) if event.logprobs else None
    return [({"delta": {"content": event.text}, "logprobs": logprobs}, None)]


def _tool_parts(held: Held, event: TokenEvent | DoneEvent) -> _Parts:
    """Text up to where a call may begin; at the end what was held back, or the calls."""
    if isinstance(event, TokenEvent):
        shown = held.push(event.text)
        return [({"delta": {"content": shown}, "logprobs": None}, None)] if shown else []
    rest, calls = held.finish()
    deltas: list[dict[str, Any]] = [{"content": rest}] if rest else []
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(calls)]
    parts: _Parts = [({"delta": delta, "logprobs": None}, None) for delta in deltas]
    return [*parts, ({"delta": {}, "logprobs": None}, "tool_calls" if calls else event.finish_reason)]


def _text_part(_index: int, event: TokenEvent | DoneEvent) -> _Parts:
    if isinstance(event, DoneEvent):
        return [({"text": "", "logprobs": None}, event.finish_reason)]
    if not event.text and not event.logprobs:
        return []
    return [({"text": event.text, "logprobs": _text_logprobs(event.logprobs) if event.logprobs else None}, None)]


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
