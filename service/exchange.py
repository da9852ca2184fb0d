"""Routes that carry a context from one cluster to another, as one file: its record, its tokens, its snapshot.

A snapshot that fits the model is taken over as it is, once a worker has checked every byte of it; otherwise the context
is compressed again from its tokens.
"""

from __future__ import annotations

import re
import struct
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from redis.exceptions import OutOfMemoryError

from precis.errors import ContextTooLong, InvalidRequest, SnapshotMissing, SnapshotStale, StoreFull
from precis.fingerprint import of_context
from precis.wire import keys
from precis.wire.exchange import Exported, Reader, Writer
from precis.wire.messages import ModelCard
from precis.wire.presets import checked, with_artifacts
from precis.wire.records import ContextRecord
from service.access import CallerDep, needs
from service.contexts import AT_ONCE, created
from service.state import State, StateDep

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])
MEDIA_TYPE = "application/vnd.precis.context"
_FIELD = re.compile(r"(\d{1,4})/(m|parts|\d{1,5}\.\d{1,6})")
_WAITS_S = 3600  # an imported snapshot, until a worker has taken it over
_BODY = {"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}


@router.get("/{context_id}/snapshot", responses={200: {"content": {MEDIA_TYPE: {}}}}, response_class=StreamingResponse)
async def export_context(context_id: str, state: StateDep, caller: CallerDep) -> Response:
    """The whole context as a file, for `POST /v1/contexts/import`. Whoever has it can read the document."""
    record = await state.ready_context(context_id, caller.tenant)
    if record.parts:
        raise InvalidRequest(f"this document was split: export its parts, {', '.join([record.id, *record.parts])}")
    if not await state.stores.snapshots.exists(keys.snapshot(record.id)):
        raise SnapshotMissing(
            f"the snapshot of {context_id} is gone: ask it, so that it is made again, and then export"
        )
    headers = {"Content-Disposition": f'attachment; filename="{record.id}.precis"'}
    return StreamingResponse(_file(state, record), media_type=MEDIA_TYPE, headers=headers)


async def _file(state: State, record: ContextRecord) -> AsyncIterator[bytes]:
    """The bytes of an export; without an end if the snapshot goes meanwhile."""
    writer, store = Writer(), state.stores.snapshots
    told = {name: getattr(record, name) for name in Exported.__struct_fields__}
    yield writer.begin()
    yield writer.frame("head", msgspec.json.encode(Exported(**told)))
    yield writer.frame("tokens", await state.records.tokens(record))
    _, retention = await state.records.retention(record)
    yield writer.frame("retention", retention)
    n_parts = int(await store.hget(keys.snapshot(record.id), "parts") or 0)
    for part in range(n_parts):
        key = keys.snapshot(record.id, part)
        for raw in sorted(await store.hkeys(key)):
            field, stored = raw.decode(), await store.hget(key, raw)
            if stored:
                plain = stored if field == "parts" else state.vault.unseal(stored, record.id, field)
                yield writer.frame(f"{part}/{field}", plain)
    if not n_parts or not await store.exists(keys.snapshot(record.id)):
        raise SnapshotMissing(f"the snapshot of {record.id} went while it was exported")
    yield writer.end()


@router.post("/import", status_code=202, responses=AT_ONCE, openapi_extra=_BODY, dependencies=[Depends(needs("write"))])
async def import_context(
    request: Request,
    state: StateDep,
    caller: CallerDep,
    wait: Annotated[float | None, Query(ge=0, le=3600)] = None,
    ttl_s: Annotated[int | None, Query(gt=0, le=10 * 365 * 86400)] = None,
    name: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """Take an exported context over; the header `x-import` says `snapshot`, or why it is compressed again."""
    async with aclosing(_frames(request)) as frames:
        told, token_ids = await _head(frames)
        card = await state.fleet.card(told.model)
        await state.fleet.need_worker(card.name, job="compress")
        length = request.headers.get("content-length", "0")
        n_bytes = int(length) if length.isdigit() else 0
        await state.records.check_room(n_bytes)
        record = await _record(state, card, told, token_ids, caller.tenant, n_bytes)
        expire_at = record.created_at + (ttl_s or state.settings.default_ttl_s)
        record = msgspec.structs.replace(record, expire_at=expire_at, name=told.name if name is None else name)
        fits = record.fingerprint == told.fingerprint
        parts = await _store(state, record, frames, keep=fits)
    try:
        body, status, headers = await created(state, request, record, token_ids, wait)
    except BaseException:
        await _forget(state, record, parts)
        raise
    if body["id"] != record.id:  # it was there already
        await _forget(state, record, parts)
    headers["x-import"] = "snapshot" if fits else "source; made with other weights, another dtype or other artifacts"
    return JSONResponse(body, status, headers=headers)


async def _frames(request: Request) -> AsyncGenerator[tuple[str, bytes], None]:
    reader = Reader()
    async for chunk in request.stream():
        for frame in reader.feed(chunk):
            yield frame
    reader.finish()


async def _head(frames: AsyncIterator[tuple[str, bytes]]) -> tuple[Exported, bytes]:
    found = {}
    for wanted in ("head", "tokens"):
        name, data = await anext(frames, ("", b""))
        if name != wanted:
            raise InvalidRequest(f"the exported context has no {wanted} where it should be")
        found[wanted] = data
    try:
        return msgspec.json.decode(found["head"], type=Exported), found["tokens"]
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the exported context cannot be read: {error}") from error


async def _record(
    state: State, card: ModelCard, told: Exported, token_ids: bytes, tenant: str, n_bytes: int
) -> ContextRecord:
    """The record of an imported context, whose every field may be a lie."""
    if told.tokenizer_digest != card.tokenizer_digest:
        raise SnapshotStale(f"{card.name} has another tokenizer or chat template here: upload the document instead")
    n = len(token_ids) // 4
    if not 0 < n <= card.max_context:
        raise ContextTooLong(f"{card.name} takes contexts of up to {card.max_context} tokens", limit=card.max_context)
    prompter = await state.fleet.prompter(card)
    ids = struct.unpack(f"<{n}i", token_ids[: 4 * n])
    start, stop = told.body
    sound = (
        len(token_ids) == 4 * n == 4 * told.n_tokens
        and min(ids) >= 0
        and max(ids) < prompter.n_vocabulary
        and 0 <= start <= stop <= n
        and told.template == ("chat" if told.roles else "raw")
        and len(told.roles) <= n
        and set(told.roles) <= {"system", "user", "assistant"}
        and len(told.name) <= 128
        and len(msgspec.json.encode(told.metadata)) <= 16384
    )
    if not sound:
        raise InvalidRequest("the exported context contradicts itself")
    how = with_artifacts(checked(told.compression), card.artifacts)
    raw_bytes = n * card.raw_bytes_per_token
    fingerprint = of_context(card.digest, token_ids, how.parameters())
    return ContextRecord(
        id=f"ctx_{uuid.uuid4().hex[:20]}",
        model=card.name,
        tokenizer_digest=card.tokenizer_digest,
        fingerprint=fingerprint,
        compression=how,
        template=told.template,
        roles=told.roles,
        body=told.body,
        n_tokens=n,
        created_at=time.time(),
        metadata=told.metadata,
        raw_bytes=raw_bytes,
        tenant=tenant,
        source=told.source,
        beginning=told.beginning,
        fidelity=told.fidelity if fingerprint == told.fingerprint else None,
        reserved_bytes=max(how.estimated_bytes(raw_bytes), n_bytes),
    )


async def _store(
    state: State, record: ContextRecord, frames: AsyncIterator[tuple[str, bytes]], *, keep: bool
) -> list[int]:
    """Read the rest of a file; keep what is of its snapshot, for a while. Returns its parts."""
    store, token = state.stores.snapshots, uuid.uuid4().hex
    staged: dict[int, str] = {}
    try:
        async for name, data in frames:
            if name == "retention" and keep:
                sealed = state.vault.seal(data, record.id, "retention")
                await state.stores.queue.set(keys.retention(record.id), sealed, ex=_WAITS_S)
            elif (match := _FIELD.fullmatch(name)) and keep:
                part, field = int(match[1]), match[2]
                key = staged.setdefault(part, keys.staging(record.id, token, part))
                plain = field == "parts"
                if plain and not data.isdigit():
                    raise InvalidRequest("the exported context contradicts itself")
                await store.hset(key, field, data if plain else state.vault.seal(data, record.id, field))
                await store.expire(key, _WAITS_S)
        async with store.pipeline(transaction=True) as pipe:
            for part, key in staged.items():
                pipe.execute_command("RENAME", key, keys.snapshot(record.id, part))  # as workers do
            await pipe.execute()
        return sorted(staged)
    except OutOfMemoryError as error:
        raise StoreFull("the snapshot store is full: delete contexts, or give it more memory") from error
    finally:
        if staged:
            await store.unlink(*staged.values())


async def _forget(state: State, record: ContextRecord, parts: list[int]) -> None:
    """Take away what was stored for an import that came to nothing."""
    if parts:
        await state.stores.snapshots.unlink(*(keys.snapshot(record.id, part) for part in parts))
    await state.stores.queue.unlink(keys.retention(record.id))
