"""Routes of contexts: upload, look, change, delete, follow."""

from __future__ import annotations

import array
import asyncio
import contextlib
import sys
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from precis.errors import ContextTooLong, EmptyDocument
from precis.fingerprint import of_context
from precis.protection import check_budget
from precis.text import ContextPart, Prompter
from precis.wire.messages import Message
from precis.wire.presets import TRANSFORM, resolve, with_artifacts
from precis.wire.records import ContextRecord, Source
from service.access import CallerDep, needs
from service.beginnings import digest_of_tokens, digests_of
from service.schemas import CodecIn, ContextIn, ContextPatch
from service.sessions import forget_all
from service.shapes import context_out
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])
_WRITES = [Depends(needs("write"))]
AT_ONCE: dict[int | str, dict[str, Any]] = {200: {"description": "it is there already, or got ready within `wait`"}}


async def created(
    state: State, request: Request, record: ContextRecord, token_ids: bytes, wait: float | None
) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Store a new context, or find the one that has its fingerprint; what is said of it, the status and headers.

    Raises:
        QueueFull, QuotaExceeded: if too many wait, or the tenant has too many.
    """
    request.state.target = record.id
    record, new = await state.records.create(record, token_ids, await state.access.quota(record.tenant))
    if wait is not None and record.status not in ("ready", "failed"):
        record = await waited(state, record, wait)
    status = 200 if record.status in ("ready", "failed") or not new else 202
    return context_out(record), status, {"Location": f"/v1/contexts/{record.id}"}


async def prepare(
    state: State, wanted: ContextIn, tenant: str, source: Source | None = None
) -> tuple[ContextRecord, bytes]:
    """Check and tokenize an upload.

    Raises:
        EmptyDocument, ContextTooLong, BudgetTooSmall, InvalidRequest, ModelNotFound: whichever it is.
    """
    compression = wanted.compression
    messages = _messages(wanted)
    card = await state.fleet.card(wanted.model)
    codec = compression.codec
    how = resolve(
        compression.policy or state.settings.default_policy,
        compression.keep_ratio,
        codec.name if isinstance(codec, CodecIn) else codec,
        ratio=codec.ratio if isinstance(codec, CodecIn) else None,
        max_bytes=compression.max_bytes,
        max_kl=compression.max_kl,
        probes=compression.probes,
        transforms=TRANSFORM in card.artifacts,
    )
    how = with_artifacts(how, card.artifacts)
    prompter = await state.fleet.prompter(card)
    part = await asyncio.to_thread(_part, prompter, wanted, messages)
    n_tokens = len(part.token_ids)
    if n_tokens > card.max_context:
        raise ContextTooLong(
            f"the document has {n_tokens} tokens, {card.name} takes contexts of up to {card.max_context}: "
            "shorten or split it",
            limit=card.max_context,
            n_tokens=n_tokens,
        )
    check_budget(n_tokens, how, part.protected)
    token_ids = int32_bytes(part.token_ids)
    now, raw_bytes = time.time(), n_tokens * card.raw_bytes_per_token
    record = ContextRecord(
        id=f"ctx_{uuid.uuid4().hex[:20]}",
        model=card.name,
        tokenizer_digest=card.tokenizer_digest,
        fingerprint=of_context(card.digest, token_ids, how.parameters()),
        compression=how,
        template=wanted.template,
        roles=list(part.roles),
        body=part.body,
        n_tokens=n_tokens,
        created_at=now,
        name=wanted.name,
        metadata=wanted.metadata,
        pinned=wanted.pinned,
        expire_at=expire_at(state, wanted, now),
        raw_bytes=raw_bytes,
        tenant=tenant,
        source=source,
        beginning=(digest_of_tokens(part.token_ids) or "") if wanted.template == "raw" else digests_of(messages)[-1],
        reserved_bytes=how.estimated_bytes(raw_bytes),
    )
    return record, token_ids


def _messages(wanted: ContextIn) -> list[Message]:
    messages = [m.plain() for m in wanted.messages or []]
    if wanted.text is not None:
        system = [Message("system", wanted.instructions)] if wanted.instructions else []
        messages = [*system, Message("user", wanted.text)]
    if not any(m.content.strip() for m in messages if m.role != "system"):
        raise EmptyDocument("the document is empty: there is nothing to ask about")
    return messages


def _part(prompter: Prompter, wanted: ContextIn, messages: list[Message]) -> ContextPart:
    return prompter.raw_part(messages[0].content) if wanted.template == "raw" else prompter.context_part(messages)


def expire_at(state: State, wanted: ContextIn | ContextPatch, now: float) -> float | None:
    if wanted.pinned:
        return None
    if wanted.expire_time is not None:
        return wanted.expire_time.timestamp()
    return now + (wanted.ttl_s or state.settings.default_ttl_s)


def int32_bytes(token_ids: list[int]) -> bytes:
    """Little-endian int32, as tokens travel and are stored."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


async def waited(state: State, record: ContextRecord, seconds: float) -> ContextRecord:
    """The record when it is ready or failed, or as it is after `seconds`."""
    subscription = await state.follower.follow(record.id)
    deadline = time.monotonic() + seconds
    try:
        while record.status not in ("ready", "failed") and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, max(0.01, deadline - time.monotonic()))):
                    await subscription.queue.get()
            record = await state.records.get(record.id, record.tenant)
    finally:
        state.follower.unfollow(subscription)
    return record


@router.get("")
async def list_contexts(
    state: StateDep,
    caller: CallerDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
    status: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Contexts from the newest on; `after` is the last id of the page before."""
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more and len(found) < limit:
        page = await state.records.page(caller.tenant, limit, after)
        has_more = len(page) == limit
        for record in page:
            if record.part_of:
                continue
            shown = context_out(record)
            if status in (None, shown["status"]) and model in (None, record.model):
                found.append(shown)
        after = page[-1].id if page else after
    return {"object": "list", "data": found[:limit], "has_more": has_more or len(found) > limit}


@router.get("/{context_id}")
async def get_context(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """One context, whatever its status."""
    return context_out(await state.records.get(context_id, caller.tenant))


@router.delete("/{context_id}", dependencies=_WRITES)
async def delete_context(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Take a context away; a running compression is cancelled."""
    freed = await removed(state, await state.records.get(context_id, caller.tenant))
    return {"id": context_id, "object": "context", "deleted": True, "freed_bytes": freed}


async def removed(state: State, record: ContextRecord) -> int:
    """Take a context away with its sessions; bytes that the servers held for it."""
    freed = 0
    for part in [await state.records.find(part_id) for part_id in record.parts]:
        if part is not None and part.part_of == record.id:
            freed += await removed(state, part)
    if record.status not in ("ready", "failed"):
        await state.jobs.cancel(record.id)
    await forget_all(state, record.id)
    return freed + await state.records.delete(record)


@router.post("/{context_id}/prefetch", status_code=202)
async def prefetch_context(context_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Let a worker load the snapshot before the first question; `held` says that one has it already."""
    record = await state.ready_context(context_id, caller.tenant)
    workers = await state.fleet.need_worker(record.model, job="answer")
    queued = await state.jobs.prefetch(context_id, record.model, workers)
    return {"id": context_id, "object": "prefetch", "status": "queued" if queued else "held"}
