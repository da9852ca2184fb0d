"""`cache: auto`: a long beginning that a tenant sends twice within an hour becomes a context by itself.

The beginning is a chat's first messages, all but the last at most; the longest that was seen before counts. It has to
have 1,024 tokens. The context is compressed as the server does by default, is named `auto`, and lives for an hour after
its last use. If it cannot be made, for a quota or because too much waits, the chat is answered all the same, and says
so.
"""

from __future__ import annotations

import time
from typing import Literal

from precis.errors import CapacityError, PrecisError, RequestError
from precis.wire import keys
from precis.wire.messages import Message, ModelCard
from precis.wire.records import ContextRecord
from service import metrics
from service.access import Caller
from service.contexts import prepare
from service.schemas import ContextIn, validated
from service.state import State

Mode = Literal["auto", "off"]
MIN_TOKENS = 1024
_SEEN_S, _LIVES_S, _RENEWED_S = 3600, 3600, 1800
_MARK = {"cache": "auto"}


async def noticed(
    state: State, caller: Caller, card: ModelCard, messages: list[Message], digests: list[str], n_tokens: int
) -> str:
    """Remember what a chat begins with; what is said of it in `x-cache`, after "miss".

    Args:
        state: of the API.
        caller: whose chat it is.
        card: of the model.
        messages: all of the chat's.
        digests: of all beginnings that could become contexts.
        n_tokens: of the whole chat.
    """
    if n_tokens < MIN_TOKENS or not digests:
        return ""
    async with state.stores.queue.pipeline(transaction=False) as pipe:
        for digest in digests:
            place = keys.seen(caller.tenant, card.name, digest)
            pipe.incr(place)
            pipe.expire(place, _SEEN_S)
        counts = (await pipe.execute())[::2]
    longest = max((n for n, count in enumerate(counts, 1) if count > 1), default=0)
    if not longest:
        return "; seen once"
    if "write" not in caller.scopes:
        return "; not stored, forbidden"
    told = [{"role": message.role, "content": message.content} for message in messages[:longest]]
    wanted = {"messages": told, "model": card.name, "name": "auto", "ttl_s": _LIVES_S, "metadata": _MARK}
    try:
        record, token_ids = await prepare(state, validated(ContextIn, wanted), caller.tenant)
        if record.n_tokens < MIN_TOKENS:
            return ""
        await state.fleet.need_worker(record.model, job="compress")
        await state.records.check_room(record.reserved_bytes)
        _, new = await state.records.create(record, token_ids, await state.access.quota(caller.tenant))
    except (RequestError, CapacityError) as error:
        metrics.AUTO_CACHED.labels(error.code).inc()
        return f"; not stored, {error.code}"
    metrics.AUTO_CACHED.labels("stored" if new else "there").inc()
    return "; being stored"


async def renew(state: State, record: ContextRecord) -> None:
    """Let a context that was made so live for an hour more, if it is used."""
    if record.metadata != _MARK or record.expire_at is None or record.expire_at - time.time() > _RENEWED_S:
        return
    try:
        await state.records.patch(record, expire_at=time.time() + _LIVES_S)
    except PrecisError:  # deleted meanwhile
        return
