"""The worker's half of context records: read them, and mark how far they are."""

from __future__ import annotations

import time
from typing import Any

import redis

from precis.errors import ContextNotReady, SnapshotMissing
from precis.wire import keys
from precis.wire.accounts import ACCOUNT
from precis.wire.codec import decode_record, record_fields
from precis.wire.records import ContextRecord
from precis.wire.vault import Vault

# A record that was deleted meanwhile is not brought back.
_MARK = (
    ACCOUNT
    + """
local before = redis.call('HGET', KEYS[1], 'status')
if not before then return 0 end
-- a late word of a worker that has lost the job to another, which has ended it
if (before == '"ready"' or before == '"failed"') and ARGV[1] ~= '' and ARGV[1] ~= 'ready' then return 1 end
local moves = ARGV[1] ~= ''  -- without a status, what a context takes stays as it is
if moves then account(-1, KEYS[1], KEYS[2], KEYS[4]) end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
if ARGV[3] ~= '' then redis.call('SET', KEYS[5], ARGV[3]) end
if moves then account(1, KEYS[1], KEYS[2], KEYS[4]) end
if ARGV[1] == 'failed' and redis.call('GET', KEYS[3]) == ARGV[2] then redis.call('DEL', KEYS[3]) end
return 1
"""
)


class Records:
    """Context records on the queue instance."""

    def __init__(self, client: redis.Redis, vault: Vault | None = None) -> None:
        self._redis, self._vault = client, vault or Vault()
        self._mark = client.register_script(_MARK)

    def get(self, context_id: str) -> ContextRecord | None:
        """The record, or None if the context was deleted."""
        stored: Any = self._redis.hgetall(keys.context(context_id))
        return decode_record(stored)

    def raw_tokens(self, record: ContextRecord) -> bytes:
        """The context's tokens as little-endian int32.

        Raises:
            SnapshotMissing: if they are gone.
            SnapshotCorrupt: if they cannot be decrypted.
            ContextNotReady: if they are not those of the record any more.
        """
        stored: Any = self._redis.get(keys.tokens(record.id))
        if stored is None:
            raise SnapshotMissing("the context's source tokens are gone: upload it again")
        tokens = self._vault.unseal(bytes(stored), record.id, "tokens")
        if len(tokens) != 4 * record.n_tokens:
            raise ContextNotReady(f"context {record.id} is being changed: ask again when it is ready")
        return tokens

    def retention(self, record: ContextRecord) -> bytes:
        """What is already stored of what was kept of each token; empty if nothing fits the record."""
        stored: Any = self._redis.get(keys.retention(record.id))
        told = b"" if stored is None else self._vault.unseal(bytes(stored), record.id, "retention")
        return told if len(told) == 1 + record.n_tokens and told[:1] in (b"k", b"p") else b""

    def mark(self, record: ContextRecord, retention: bytes = b"", **changes: Any) -> bool:
        """Set fields, and what was kept of each token; False if the context was deleted meanwhile."""
        fields = [part for pair in record_fields(**changes).items() for part in pair]
        status = changes.get("status", "")
        kept = self._vault.seal(retention, record.id, "retention") if retention else b""
        where = [
            keys.context(record.id),
            keys.TOTALS,
            keys.fingerprint(record.tenant, record.fingerprint),
            keys.usage(record.tenant),
            keys.retention(record.id),
        ]
        return bool(self._mark(keys=where, args=[status, record.id, kept, *fields]))

    def touch(self, record: ContextRecord) -> None:
        """Remember that the context was used now."""
        self.mark(record, last_used_at=time.time())
