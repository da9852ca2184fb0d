"""OpenAI's responses: a chat whose turns the server remembers, by the id of the last response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import PrecisError, ResponseNotFound
from precis.wire import keys
from precis.wire.messages import DoneEvent, Message
from service import metrics, sse
from service.access import Caller, CallerDep
from service.asking import done_of
from service.choosing import Choices, choose, schema_of
from service.openai_schemas import ResponseIn
from service.problems import body_of
from service.prompts import Chat, prompt_of
from service.state import State, StateDep

router = APIRouter(prefix="/v1/responses", tags=["openai"])


class Stored(msgspec.Struct, frozen=True):
    """A response and what it answered.

    Attributes:
        messages: all turns after the context, without instructions, the answer last.
        contexts: those that were named.
        body: as it was sent.
    """

    tenant: str
    messages: list[Message]
    contexts: list[str]
    body: dict[str, Any]


@router.post("", responses=sse.MAYBE)
async def create_response(wanted: ResponseIn, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Answer, after an earlier response if `previous_response_id` names one."""
    before = None
    if wanted.previous_response_id is not None:
        before = await _find(state, caller, wanted.previous_response_id)
    turns = [*(before.messages if before else []), *wanted.turns]
    contexts = wanted.contexts or (before.contexts if before else [])
    system = [Message("system", wanted.instructions)] if wanted.instructions else []
    chat = Chat(wanted.model, contexts or None, [*system, *turns], wanted.cache)
    prompt = await prompt_of(state, caller, chat)
    choices = await choose(state, request, prompt, wanted, schema=schema_of(wanted.format))
    head = _head(choices, wanted)
    headers = {"x-cache": choices.cache + prompt.note, "x-context": prompt.context_id}

    async def finished(text: str, done: DoneEvent) -> dict[str, Any]:
        body = _finished(head, text, done)
        if wanted.store:
            kept = Stored(caller.tenant, [*turns, Message("assistant", text)], contexts, body)
            ttl = state.settings.default_ttl_s
            stored = state.vault.seal(msgspec.json.encode(kept), body["id"], "response")
            await state.stores.queue.set(keys.response(body["id"]), stored, ex=ttl)
        return body

    if wanted.stream:
        return sse.Stream(_frames(choices, head, finished, request.url.path), choices.close, headers)
    (found,) = await choices.collect(request)
    return JSONResponse(await finished(found.text, done_of(found)), headers=headers)


@router.get("/{response_id}")
async def get_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """A stored response."""
    return (await _find(state, caller, response_id)).body


@router.delete("/{response_id}")
async def delete_response(response_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Forget a response; those that came after it keep what they know."""
    await _find(state, caller, response_id)
    await state.stores.queue.unlink(keys.response(response_id))
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _find(state: State, caller: Caller, response_id: str) -> Stored:
    stored = await state.stores.queue.get(keys.response(response_id))
    plain = None if stored is None else state.vault.unseal(stored, response_id, "response")
    try:
        found = None if plain is None else msgspec.json.decode(plain, type=Stored)
    except msgspec.ValidationError:  # stored by an earlier version
        found = None
    if found is None or found.tenant != caller.tenant:
        raise ResponseNotFound(f"there is no response {response_id}, or it has expired")
    return found


def _head(choices: Choices, wanted: ResponseIn) -> dict[str, Any]:
    """A response before its first token."""
    return {
        "id": f"resp_{uuid.uuid4().hex[:24]}",
        "object": "response",
        "created_at": choices.created,
        "model": choices.model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "metadata": wanted.metadata,
        "previous_response_id": wanted.previous_response_id,
        "max_output_tokens": wanted.max_output_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "text": {"format": wanted.format or {"type": "text"}},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": None,
    }


def _item(head: dict[str, Any], text: str | None, status: str) -> dict[str, Any]:
    """The one message of a response."""
    content = [] if text is None else [_part(text)]
    return {"id": _item_id(head), "type": "message", "role": "assistant", "status": status, "content": content}


def _item_id(head: dict[str, Any]) -> str:
    return str(head["id"]).replace("resp_", "msg_")


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _finished(head: dict[str, Any], text: str, done: DoneEvent) -> dict[str, Any]:
    complete = done.finish_reason == "stop"
    status = "completed" if complete else "incomplete"
    return {
        **head,
        "status": status,
        "completed_at": int(time.time()),
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "output": [_item(head, text, status)],
        "usage": {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        },
    }


async def _frames(choices: Choices, head: dict[str, Any], finished: Any, path: str) -> AsyncIterator[bytes]:
    """Events as OpenAI sends them, numbered."""
    number, text, place = 0, "", {"item_id": _item_id(head), "output_index": 0, "content_index": 0}

    def event(kind: str, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return sse.frame(json.dumps({"type": kind, "sequence_number": number - 1, **data}), kind)

    yield event("response.created", response=head)
    yield event("response.in_progress", response=head)
    yield event("response.output_item.added", output_index=0, item=_item(head, None, "in_progress"))
    yield event("response.content_part.added", **place, part=_part(""))
    try:
        async for _, found in choices.events():
            if isinstance(found, DoneEvent):
                body = await finished(text, found)
                yield event("response.output_text.done", **place, text=text, logprobs=[])
                yield event("response.content_part.done", **place, part=_part(text))
                yield event("response.output_item.done", output_index=0, item=body["output"][0])
                yield event(f"response.{body['status']}", response=body)
            elif found.text:
                text += found.text
                yield event("response.output_text.delta", **place, delta=found.text, logprobs=[])
    except PrecisError as error:
        metrics.ERRORS.labels(error.code).inc()
        said = body_of(error, path)["error"]
        failed = {**head, "status": "failed", "error": {"code": "server_error", "message": said["message"]}}
        yield event("response.failed", response=failed)
