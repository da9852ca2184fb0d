"""Gemini's routes: `cachedContents` are contexts, and `generateContent` asks them, so that `google-genai` works."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response

from precis.errors import ContextFailed, InvalidRequest, PageNotFound, PrecisError
from precis.wire.messages import DoneEvent
from precis.wire.records import ContextRecord
from service import metrics, sse
from service.access import CallerDep, needs
from service.asking import done_of
from service.choosing import Choices, choose
from service.contexts import created, prepare, removed
from service.gemini_schemas import CachedContentIn, CachedContentPatch, GenerateIn, messages_of
from service.problems import body_of
from service.prompts import Chat, prompt_of
from service.schemas import ContextIn, validated
from service.shapes import stamp
from service.state import State, StateDep

router = APIRouter(prefix="/v1beta", tags=["gemini"])
_WRITES = [Depends(needs("write"))]
_DEFAULT_TTL_S, _WAIT_S = 3600, 600.0
_FINISH = {"stop": "STOP", "length": "MAX_TOKENS"}
_TARGET = re.compile(r"(.+):(generateContent|streamGenerateContent|countTokens)")


@router.post("/cachedContents", dependencies=_WRITES)
async def create_cached_content(
    wanted: CachedContentIn, request: Request, state: StateDep, caller: CallerDep
) -> dict[str, Any]:
    """Make a context, and wait until it can be asked. It lives for an hour if nothing is said."""
    upload = validated(
        ContextIn,
        {
            "messages": [
                {"role": m.role, "content": m.content} for m in messages_of(wanted.contents, wanted.system_instruction)
            ],
            "model": _name(wanted.model),
            "name": wanted.display_name,
            **_expiry(wanted),
        },
    )
    record, token_ids = await prepare(state, upload, caller.tenant)
    await state.fleet.need_worker(record.model, job="compress")
    await state.records.check_room(record.reserved_bytes)
    body, _, _ = await created(state, request, record, token_ids, _WAIT_S)
    made = await state.records.get(body["id"], caller.tenant)
    if made.status == "failed":
        raise ContextFailed(f"the content could not be cached: {made.error.detail if made.error else 'unknown'}")
    return _out(made)


@router.get("/cachedContents")
async def list_cached_contents(
    state: StateDep,
    caller: CallerDep,
    page_size: Annotated[int, Query(alias="pageSize", ge=1, le=1000)] = 50,
    page_token: Annotated[str | None, Query(alias="pageToken")] = None,
) -> dict[str, Any]:
    """Contexts, the newest first."""
    found = await state.records.page(caller.tenant, page_size + 1, page_token or None)
    page, more = found[:page_size], {}
    if len(found) > page_size:
        more = {"nextPageToken": page[-1].id}
    return {"cachedContents": [_out(record) for record in page], **more}


@router.get("/cachedContents/{context_id}")
async def get_cached_content(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """One context."""
    return _out(await state.records.get(context_id, caller.tenant))


@router.patch("/cachedContents/{context_id}", dependencies=_WRITES)
async def patch_cached_content(
    context_id: str, wanted: CachedContentPatch, state: StateDep, caller: CallerDep
) -> dict[str, Any]:
    """Change the expiry."""
    record = await state.ready_context(context_id, caller.tenant)
    told = validated(ContextIn, {"text": "", **_expiry(wanted)})
    at = told.expire_time.timestamp() if told.expire_time else time.time() + (told.ttl_s or _DEFAULT_TTL_S)
    return _out(await state.records.patch(record, expire_at=at, pinned=False))


@router.delete("/cachedContents/{context_id}", dependencies=_WRITES)
async def delete_cached_content(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Delete a context."""
    await removed(state, await state.records.get(context_id, caller.tenant))
    return {}


@router.get("/models")
async def list_gemini_models(state: StateDep) -> dict[str, Any]:
    """Models with a live worker, in Gemini's shape."""
    return {"models": [await _model_out(state, name) for name in await state.fleet.models()]}


@router.get("/models/{model:path}")
async def get_gemini_model(model: str, state: StateDep) -> dict[str, Any]:
    """One model."""
    return await _model_out(state, model)


@router.post("/models/{model:path}", responses=sse.MAYBE)
async def generate(
    model: str, wanted: GenerateIn, request: Request, state: StateDep, caller: CallerDep, alt: str = "json"
) -> Response:
    """`MODEL:generateContent`, `MODEL:streamGenerateContent?alt=sse` or `MODEL:countTokens`."""
    if (match := _TARGET.fullmatch(model)) is None:
        raise PageNotFound(
            f"there is nothing at models/{model}: use generateContent, streamGenerateContent, countTokens"
        )
    model, action = match[1], match[2]
    context_ids = None if wanted.cached_content is None else [_name(wanted.cached_content)]
    messages = messages_of(wanted.contents, wanted.system_instruction)
    prompt = await prompt_of(state, caller, Chat(model, context_ids, messages))
    if action == "countTokens":
        return JSONResponse(
            {
                "totalTokens": prompt.n_context + len(prompt.token_ids),
                "cachedContentTokenCount": prompt.n_context,
            }
        )
    if action == "streamGenerateContent" and alt != "sse":
        raise InvalidRequest("streams are server-sent events here: add ?alt=sse")
    choices = await choose(state, request, prompt, wanted.sampling(), schema=wanted.generation_config.schema_text())
    headers = {"x-cache": choices.cache, "x-context": prompt.context_id}
    if action == "streamGenerateContent":
        return sse.Stream(_frames(choices, request.url.path), choices.close, headers)
    found = [(each.text, done_of(each)) for each in await choices.collect(request)]
    candidates = [_candidate(index, text, done) for index, (text, done) in enumerate(found)]
    usage = _usage([done for _, done in found])
    return JSONResponse({"candidates": candidates, **_head(choices), **usage}, headers=headers)


async def _frames(choices: Choices, path: str) -> AsyncIterator[bytes]:
    done: list[DoneEvent] = []
    try:
        async for index, event in choices.events():
            if isinstance(event, DoneEvent):
                done.append(event)
                usage = _usage(done) if len(done) == len(choices.asked) else {}
                chunk = {"candidates": [_candidate(index, "", event)], **_head(choices), **usage}
            elif event.text:
                chunk = {"candidates": [_candidate(index, event.text, None)], **_head(choices)}
            else:
                continue
            yield sse.frame(json.dumps(chunk))
    except PrecisError as error:
        metrics.ERRORS.labels(error.code).inc()
        yield sse.frame(json.dumps(body_of(error, path)))


def _candidate(index: int, text: str, done: DoneEvent | None) -> dict[str, Any]:
    reason = {} if done is None else {"finishReason": _FINISH[done.finish_reason]}
    return {"index": index, "content": {"role": "model", "parts": [{"text": text}]}, **reason}


def _head(choices: Choices) -> dict[str, Any]:
    return {"modelVersion": choices.model, "responseId": choices.id}


def _usage(done: list[DoneEvent]) -> dict[str, Any]:
    n_new = sum(each.completion_tokens for each in done)
    return {
        "usageMetadata": {
            "promptTokenCount": done[0].prompt_tokens,
            "cachedContentTokenCount": done[0].cached_tokens,
            "candidatesTokenCount": n_new,
            "totalTokenCount": done[0].prompt_tokens + n_new,
        }
    }


def _out(record: ContextRecord) -> dict[str, Any]:
    """A context as Gemini shows it; one that never expires says the year 9999."""
    return {
        "name": f"cachedContents/{record.id}",
        "model": f"models/{record.model}",
        "displayName": record.name,
        "createTime": stamp(record.created_at),
        "updateTime": stamp(record.last_used_at or record.created_at),
        "expireTime": stamp(record.expire_at) or "9999-12-31T23:59:59Z",
        "usageMetadata": {"totalTokenCount": record.n_tokens},
    }


async def _model_out(state: State, name: str) -> dict[str, Any]:
    card = await state.fleet.card(name)
    return {
        "name": f"models/{card.name}",
        "displayName": card.name,
        "inputTokenLimit": card.max_context,
        "outputTokenLimit": card.max_length,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
    }


def _name(resource: str) -> str:
    """What comes after `models/` or `cachedContents/`."""
    return re.sub(r"^(models|cachedContents)/", "", resource)


def _expiry(wanted: CachedContentIn | CachedContentPatch) -> dict[str, Any]:
    if wanted.ttl is not None and wanted.expire_time is not None:
        raise InvalidRequest("give one of ttl and expireTime")
    if wanted.expire_time is not None:
        return {"expire_time": wanted.expire_time}
    return {"ttl_s": max(1, round(float(wanted.ttl[:-1]))) if wanted.ttl is not None else _DEFAULT_TTL_S}
