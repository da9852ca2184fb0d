"""The service's half of context records: create once, get, list, change, delete, expire."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import structlog
from redis.exceptions import RedisError

from precis.errors import ContextNotFound, ContextNotReady, InvalidRequest, QueueFull, QuotaExceeded, StoreFull
from precis.wire import keys
from precis.wire.codec import decode_record, encode, record_fields, whole_record
from precis.wire.messages import CompressJob
from precis.wire.records import ContextRecord, Quota
from precis.wire.traces import carrier
from precis.wire.vault import Vault
from service import metrics
from service.scripts import CREATE, PATCH, REMOVE, REQUEUE
from service.store import Stores, free_bytes

_TOMBSTONE_S = 86400
_SWEEP_S = 1.0
_QUOTAS = {"contexts": "contexts", "bytes": "stored bytes", "active": "contexts waiting or being compressed"}


class Records:
    """Context records on the queue instance, and their snapshots' expiry on the store instance."""

    def __init__(self, stores: Stores, compress_limit: int, vault: Vault) -> None:
        self._queue, self._store, self._vault = stores.queue, stores.snapshots, vault
        self._limit = compress_limit
        self._create = self._queue.register_script(CREATE)
        self._remove = self._queue.register_script(REMOVE)
        self._patch = self._queue.register_script(PATCH)
        self._requeue = self._queue.register_script(REQUEUE)

    async def create(self, record: ContextRecord, token_ids: bytes, quota: Quota) -> tuple[ContextRecord, bool]:
        """Store a context and queue its compression, or find the one that already has this fingerprint.

        Returns:
            The record, and whether it is new.

        Raises:
            QueueFull, QuotaExceeded: if too many contexts wait, or the tenant has too many; nothing was stored then.
        """
        fields = [part for pair in whole_record(record).items() for part in pair]
        where = [
            keys.fingerprint(record.tenant, record.fingerprint),
            keys.context(record.id),
            keys.tokens(record.id),
            keys.contexts(record.tenant),
            keys.EXPIRY,
            keys.compress_jobs(record.model),
            keys.TOTALS,
            keys.usage(record.tenant),
            keys.beginning(record.tenant, record.model, record.beginning),
        ]
        expire = "" if record.expire_at is None else record.expire_at
        bounds = [quota.max_contexts, quota.max_bytes, quota.max_active, record.reserved_bytes]
        source = self._vault.seal(token_ids, record.id, "tokens")
        args = [record.id, record.created_at, expire, self._limit, encode(CompressJob(record.id, carrier())), source]
        for _ in range(2):
            answer: str = (await self._create(keys=where, args=[*args, *bounds, *fields])).decode()
            if answer.startswith("quota:"):
                raise QuotaExceeded(_over(answer.removeprefix("quota:"), quota), quota=answer.removeprefix("quota:"))
            if answer == "full":
                raise QueueFull(
                    f"{self._limit} contexts are waiting or running, which is the limit: try again", retry_after_s=10
                )
            if answer == record.id:
                metrics.CONTEXTS_CREATED.labels("new").inc()
                return record, True
            found = await self.find(answer)
            if found is not None and not expired(found):
                metrics.CONTEXTS_CREATED.labels("existing").inc()
                return found, False
            await self._queue.delete(where[0])  # it points to nothing that can be asked
        raise ContextNotFound("the same context is being deleted: upload it again")

    async def check_room(self, n_bytes: int) -> None:
        """Refuse an upload whose snapshot the store could not hold.

        Raises:
            StoreFull: naming what is needed and what there is.
        """
        if n_bytes > (free := await free_bytes(self._store)):
            raise StoreFull(
                f"the snapshot needs about {n_bytes / 1e6:.1f} MB, the store has {max(0.0, free) / 1e6:.1f} MB for it: "
                "delete contexts, compress more, or give the store more memory"
            )

    async def find(self, context_id: str) -> ContextRecord | None:
        """A record, or None."""
        return decode_record(await self._queue.hgetall(keys.context(context_id)))

    async def get(self, context_id: str, tenant: str) -> ContextRecord:
        """A tenant's record.

        Raises:
            ContextNotFound: if there is none, or it is another tenant's: both answers are the same.
        """
        record = await self.find(context_id)
        if record is None or record.tenant != tenant:
            raise ContextNotFound(f"there is no context {context_id}")
        return record

    async def page(self, tenant: str, limit: int, after: str | None) -> list[ContextRecord]:
        """A tenant's records from the newest on, `limit` at most, after the one named.

        Raises:
            ContextNotFound: if `after` names none.
        """
        start = 0
        if after is not None:
            rank = await self._queue.zrevrank(keys.contexts(tenant), after)
            if rank is None:
                raise ContextNotFound(f"there is no context {after}")
            start = rank + 1
        ids = await self._queue.zrevrange(keys.contexts(tenant), start, start + limit - 1)
        async with self._queue.pipeline(transaction=False) as pipe:
            for raw in ids:
                pipe.hgetall(keys.context(raw.decode()))
            found = await pipe.execute() if ids else []
        return [record for stored in found if (record := decode_record(stored)) is not None]

    async def retention(self, record: ContextRecord) -> tuple[list[int], bytes]:
        """A ready context's tokens, and what was kept of them: `k` or `p`, then a byte each.

        Raises:
            ContextNotFound: if it was deleted meanwhile.
        """
        tokens, told = await self._queue.mget(keys.tokens(record.id), keys.retention(record.id))
        tokens = tokens and self._vault.unseal(tokens, record.id, "tokens")
        told = told and self._vault.unseal(told, record.id, "retention")
        if not tokens or not told or len(told) != 1 + len(tokens) // 4:
            raise ContextNotFound(f"there is no context {record.id}")
        return list(struct.unpack(f"<{len(tokens) // 4}i", tokens)), told

    async def tokens(self, record: ContextRecord) -> bytes:
        """A context's tokens, little-endian int32.

        Raises:
            ContextNotFound: if it was deleted meanwhile.
            SnapshotCorrupt: if they cannot be decrypted.
        """
        stored = await self._queue.get(keys.tokens(record.id))
        if stored is None:
            raise ContextNotFound(f"there is no context {record.id}")
        return self._vault.unseal(bytes(stored), record.id, "tokens")

    async def patch(self, record: ContextRecord, **changes: Any) -> ContextRecord:
        """Change fields; a changed expiry moves the snapshot's as well.

        Raises:
            ContextNotFound: if it was deleted meanwhile.
        """
        fields = [part for pair in record_fields(**changes).items() for part in pair]
        expire_at = changes.get("expire_at", record.expire_at)
        args = [record.id, "" if expire_at is None else expire_at, *fields]
        if not await self._patch(keys=[keys.context(record.id), keys.EXPIRY], args=args):
            raise ContextNotFound(f"there is no context {record.id}")
        for key in await self._parts(record.id):
            await (self._store.persist(key) if expire_at is None else self._store.pexpireat(key, int(expire_at * 1000)))
        return await self.get(record.id, record.tenant)

    async def requeue(
        self, record: ContextRecord, fingerprint: str, quota: Quota, token_ids: bytes = b"", **changes: Any
    ) -> ContextRecord:
        """Queue a ready context to be made anew: smaller, or of more tokens.

        Args:
            record: ready.
            fingerprint: that it will have.
            quota: of its tenant.
            token_ids: that it will have; empty: as they are.
            changes: of the record's fields.

        Raises:
            ContextNotFound, ContextNotReady: if it was deleted or changed meanwhile.
            InvalidRequest: naming the context that is already what this one would be.
            QueueFull, QuotaExceeded: if too many contexts wait, or the tenant has too much; nothing was changed then.
        """
        changes = {"status": "queued", "queued_at": time.time(), "fidelity": None, **changes}
        fields = record_fields(fingerprint=fingerprint, **changes)
        where = [
            keys.context(record.id),
            keys.fingerprint(record.tenant, record.fingerprint),
            keys.fingerprint(record.tenant, fingerprint),
            keys.TOTALS,
            keys.compress_jobs(record.model),
            keys.events(record.id),  # those of the first compression end with ready
            keys.usage(record.tenant),
            keys.tokens(record.id),
            keys.beginning(record.tenant, record.model, record.beginning),
        ]
        sealed = self._vault.seal(token_ids, record.id, "tokens") if token_ids else b""
        reserved = changes.get("reserved_bytes", record.stored_bytes)
        fields.pop("reserved_bytes", None)
        job = encode(CompressJob(record.id, carrier()))
        args: list[Any] = [record.id, self._limit, job, sealed, quota.max_bytes, reserved]
        args += [part for pair in fields.items() for part in pair]
        answer: str = (await self._requeue(keys=where, args=args)).decode()
        if answer == "gone":
            raise ContextNotFound(f"there is no context {record.id}")
        if answer == "changed":
            raise ContextNotReady(f"context {record.id} is being changed: try again")
        if answer == "full":
            raise QueueFull(f"{self._limit} contexts are waiting or running, which is the limit", retry_after_s=10)
        if answer.startswith("quota:"):
            raise QuotaExceeded(_over("bytes", quota), quota="bytes")
        if answer != "queued":
            raise InvalidRequest(f"context {answer} has the same document at this budget already")
        return await self.get(record.id, record.tenant)

    async def delete(self, record: ContextRecord) -> int:
        """Take a context away with all that is stored of it.

        Returns:
            Bytes that the servers held for it.
        """
        parts = await self._parts(record.id)
        freed = 0
        for client, key in [
            *((self._store, part) for part in parts),
            *((self._queue, key) for key in (keys.context(record.id), keys.tokens(record.id), keys.events(record.id))),
        ]:
            freed += int(await client.memory_usage(key, samples=0) or 0)
        await self._take_away(record, tombstone="")
        await self._store.unlink(*parts)
        return freed

    async def _take_away(self, record: ContextRecord, tombstone: str) -> None:
        where = [
            keys.context(record.id),
            keys.tokens(record.id),
            keys.fingerprint(record.tenant, record.fingerprint),
            keys.contexts(record.tenant),
            keys.EXPIRY,
            keys.TOMBSTONES,
            keys.TOTALS,
            keys.events(record.id),
            keys.usage(record.tenant),
            keys.retention(record.id),
            keys.beginning(record.tenant, record.model, record.beginning),
            keys.ARCHIVED,
            keys.UNARCHIVED,
        ]
        expired_error = '{"code":"context_expired","detail":"the context has expired"}'
        await self._remove(keys=where, args=[record.id, tombstone, expired_error])

    async def unlink_snapshot(self, snapshot_id: str) -> None:
        """Take a snapshot away with all of its parts."""
        await self._store.unlink(*await self._parts(snapshot_id))

    async def _parts(self, context_id: str) -> list[str]:
        n_parts = await self._store.hget(keys.snapshot(context_id), "parts")
        return [keys.snapshot(context_id, part) for part in range(int(n_parts or 1))]

    async def sweep(self) -> None:
        """Expire what is due, and forget records that have been expired for a day. Any API process may do it."""
        now = time.time()
        for raw in await self._queue.zrangebyscore(keys.EXPIRY, 0, now, start=0, num=100):
            record = await self.find(raw.decode())
            if record is None:
                await self._queue.zrem(keys.EXPIRY, raw)
                continue
            await self._take_away(record, tombstone=str(now + _TOMBSTONE_S))
            await self.unlink_snapshot(record.id)
            metrics.EXPIRED.inc()
        for raw in await self._queue.zrangebyscore(keys.TOMBSTONES, 0, now, start=0, num=100):
            record = await self.find(raw.decode())
            if record is not None:
                await self._take_away(record, tombstone="")
            await self._queue.zrem(keys.TOMBSTONES, raw)

    async def sweep_forever(self) -> None:
        """Sweep every second."""
        while True:
            try:
                await self.sweep()
            except RedisError as error:
                structlog.get_logger("records").warning("sweep_failed", error=type(error).__name__)
            await asyncio.sleep(_SWEEP_S)


def expired(record: ContextRecord) -> bool:
    """Whether a context has reached its expiry."""
    gone = record.error is not None and record.error.code == "context_expired"
    return gone or (record.expire_at is not None and record.expire_at <= time.time())


def _over(what: str, quota: Quota) -> str:
    bound = {"contexts": quota.max_contexts, "bytes": quota.max_bytes, "active": quota.max_active}[what]
    advice = "wait until some are ready" if what == "active" else "delete contexts, or ask for a larger quota"
    return f"the quota of {bound:,} {_QUOTAS[what]} is used up: {advice}"
