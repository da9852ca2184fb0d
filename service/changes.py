"""Routes that change a context which is there already: expiry, name, budget, and more text."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse, Response

from precis.errors import ContextTooLong, EmptyDocument, InvalidRequest
from precis.fingerprint import of_context
from precis.protection import check_budget, tighter
from precis.wire.records import ContextRecord, around
from service.access import CallerDep, needs
from service.contexts import AT_ONCE, expire_at, int32_bytes, waited
from service.models import model_of
from service.records import expired
from service.schemas import AppendIn, ContextPatch
from service.shapes import context_out, kept_ratio
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])
_WRITES = [Depends(needs("write"))]


@router.patch("/{context_id}", dependencies=_WRITES)
async def patch_context(context_id: str, wanted: ContextPatch, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Change expiry, pin, name or metadata; or keep less, which makes the context queued until it is cut."""
    record = await state.records.get(context_id, caller.tenant)
    if expired(record):
        record = await state.ready_context(context_id, caller.tenant)
    changes: dict[str, Any] = wanted.model_dump(include={"name", "metadata"}, exclude_none=True)
    if wanted.pinned is not None or wanted.ttl_s is not None or wanted.expire_time is not None:
        changes |= {"pinned": bool(wanted.pinned), "expire_at": expire_at(state, wanted, time.time())}
    if changes:
        record = await state.records.patch(record, **changes)
        lives = {name: value for name, value in changes.items() if name in ("pinned", "expire_at")}
        for part in [await state.records.find(part_id) for part_id in record.parts] if lives else []:
            if part is not None and part.tenant == record.tenant:
                await state.records.patch(part, **lives)
    if wanted.compression is not None:
        _check_whole(record)
        record = await _tighten(state, record, wanted.compression.keep_ratio)
    return context_out(record)


async def _tighten(state: State, record: ContextRecord, keep_ratio: float) -> ContextRecord:
    record = await state.ready_context(record.id, record.tenant)
    card = await state.fleet.card(record.model)
    how = tighter(record.compression, keep_ratio, record.n_tokens, kept_ratio(record) or 1.0, record.protected)
    await state.fleet.need_worker(record.model, job="compress")
    fingerprint = of_context(card.digest, await state.records.tokens(record), how.parameters())
    quota = await state.access.quota(record.tenant)
    return await state.records.requeue(record, fingerprint, quota, compression=how)


def _check_whole(record: ContextRecord) -> None:
    if record.parts or record.part_of:
        raise InvalidRequest("this document was split over several contexts: upload it again instead")


@router.post("/{context_id}/append", status_code=202, responses=AT_ONCE, dependencies=_WRITES)
async def append_text(
    context_id: str,
    wanted: AppendIn,
    state: StateDep,
    caller: CallerDep,
    wait: Annotated[float | None, Query(ge=0, le=3600)] = None,
) -> Response:
    """Let a context grow by text: as one more message of the user, or right at the end of a raw one.

    Where everything is stored, only the new text is read; else the whole document is.
    """
    record = await state.ready_context(context_id, caller.tenant)
    _check_whole(record)
    card, prompter = await model_of(state, record)
    if not wanted.text.strip():
        raise EmptyDocument("there is nothing to append: the text is empty")
    more = await asyncio.to_thread(prompter.appended, tuple(record.roles), wanted.text)
    token_ids = await state.records.tokens(record) + int32_bytes(more.token_ids)
    n_tokens = len(token_ids) // 4
    if n_tokens > card.max_context:
        raise ContextTooLong(
            f"with this text there are {n_tokens} tokens, {card.name} takes contexts of up to {card.max_context}",
            limit=card.max_context,
            n_tokens=n_tokens,
        )
    body = (record.body[0], record.n_tokens + more.body[1])
    check_budget(n_tokens, record.compression, around(body, n_tokens))
    await state.fleet.need_worker(record.model, job="compress")
    raw_bytes = n_tokens * card.raw_bytes_per_token
    reserved = record.compression.estimated_bytes(raw_bytes)
    await state.records.check_room(max(0, reserved - record.stored_bytes))
    record = await state.records.requeue(
        record,
        of_context(card.digest, token_ids, record.compression.parameters()),
        await state.access.quota(record.tenant),
        token_ids,
        n_tokens=n_tokens,
        raw_bytes=raw_bytes,
        body=body,
        roles=list(more.roles),
        beginning="",
        processed=0,
        reserved_bytes=reserved,
    )
    if wait is not None:
        record = await waited(state, record, wait)
    return JSONResponse(context_out(record), 200 if record.status in ("ready", "failed") else 202)
