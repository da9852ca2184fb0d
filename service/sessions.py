"""Routes of sessions: conversations on top of a context, whose turns are stored as they were fed."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from precis.errors import InvalidRequest, SessionBusy, SessionNotFound
from precis.wire import keys
from precis.wire.codec import decode, encode
from precis.wire.records import ContextRecord, SessionState
from service.access import CallerDep
from service.schemas import Strict
from service.shapes import stamp
from service.state import State, StateDep

router = APIRouter(tags=["sessions"])
_TTL_S, _LONGEST_S, _TURN_S = 86400, 30 * 86400, 120


class SessionIn(Strict):
    """A conversation to be begun."""

    ttl_s: int = Field(_TTL_S, gt=0, le=_LONGEST_S, description="seconds that it lives after its last turn")


@router.post("/v1/contexts/{context_id}/sessions", status_code=201)
async def create_session(
    context_id: str, state: StateDep, caller: CallerDep, wanted: SessionIn | None = None
) -> dict[str, Any]:
    """Begin a conversation: ask the context with its id as `session`, one turn at a time."""
    record = await state.ready_context(context_id, caller.tenant)
    made = SessionState(record.id, caller.tenant, [], 0, (wanted or SessionIn()).ttl_s)
    session_id = f"ses_{uuid.uuid4().hex[:20]}"
    async with state.stores.queue.pipeline(transaction=True) as pipe:
        stored = state.vault.seal(encode(made), session_id, "state")
        pipe.set(keys.session(session_id), stored, ex=made.ttl_s)
        pipe.zadd(keys.sessions(record.id), {session_id: time.time()})
        pipe.expire(keys.sessions(record.id), _LONGEST_S)
        await pipe.execute()
    return session_out(session_id, made, made.ttl_s)


@router.get("/v1/sessions/{session_id}")
async def get_session(session_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """One conversation."""
    found = await find(state, session_id, caller.tenant)
    return session_out(session_id, found, await state.stores.queue.ttl(keys.session(session_id)))


@router.delete("/v1/sessions/{session_id}")
async def delete_session(session_id: str, state: StateDep, caller: CallerDep) -> dict[str, Any]:
    """Forget a conversation and what is stored of it."""
    found = await find(state, session_id, caller.tenant)
    await state.stores.queue.zrem(keys.sessions(found.context_id), session_id)
    await state.stores.queue.unlink(keys.session(session_id), keys.turn(session_id))
    await _unlink_deltas(state, session_id, found)
    return {"id": session_id, "object": "session", "deleted": True}


async def forget_all(state: State, context_id: str) -> None:
    """Take all sessions of a context away."""
    ids = [raw.decode() for raw in await state.stores.queue.zrange(keys.sessions(context_id), 0, -1)]
    if not ids:
        return
    for session_id, stored in zip(ids, await state.stores.queue.mget([*map(keys.session, ids)]), strict=True):
        if stored is not None:
            await _unlink_deltas(state, session_id, _opened(state, session_id, stored))
    await state.stores.queue.unlink(*map(keys.session, ids), *map(keys.turn, ids), keys.sessions(context_id))


async def _unlink_deltas(state: State, session_id: str, found: SessionState) -> None:
    for turn, _ in found.deltas:
        await state.records.unlink_snapshot(keys.delta(session_id, turn))


def _opened(state: State, session_id: str, stored: bytes) -> SessionState:
    return decode(state.vault.unseal(stored, session_id, "state"), SessionState)


async def find(state: State, session_id: str, tenant: str) -> SessionState:
    """A tenant's session.

    Raises:
        SessionNotFound: if there is none, it has expired, or it is another tenant's.
    """
    stored = await state.stores.queue.get(keys.session(session_id))
    found = None if stored is None else _opened(state, session_id, stored)
    if found is None or found.tenant != tenant:
        raise SessionNotFound(f"there is no session {session_id}, or it has expired")
    return found


async def begin_turn(state: State, session_id: str, record: ContextRecord) -> SessionState:
    """The session as it is before a turn; until the turn is over, no other begins.

    Raises:
        SessionNotFound, SessionBusy, InvalidRequest: if there is none, a turn runs, or it is on another context.
    """
    found = await find(state, session_id, record.tenant)
    if found.context_id != record.id:
        raise InvalidRequest(f"session {session_id} is on the context {found.context_id}")
    if not await state.stores.queue.set(keys.turn(session_id), 1, nx=True, ex=_TURN_S):
        raise SessionBusy(f"a turn of session {session_id} is being answered: wait for its end, or stop it")
    return await find(state, session_id, record.tenant)


async def end_turn(state: State, session_id: str) -> None:
    """Let the next turn begin."""
    await state.stores.queue.unlink(keys.turn(session_id))


def session_out(session_id: str, found: SessionState, left_s: int) -> dict[str, Any]:
    """A session as clients see it."""
    return {
        "id": session_id,
        "object": "session",
        "context": found.context_id,
        "turns": found.turns,
        "tokens": found.n_fed,
        "expire_time": stamp(int(time.time()) + max(0, left_s)),
    }
