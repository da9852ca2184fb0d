"""Snapshots in the store: one hash each, published whole by RENAME, so that expiry and eviction take all or nothing.

Fields: `m` the sealed manifest, then `LAYER.PIECE`, slices of at most `chunk_bytes`. A snapshot above 512 MiB becomes
several hashes of whole layers, renamed in one transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import redis

from precis.container import Packed
from precis.errors import SnapshotMissing, StoreFull
from precis.wire import keys
from precis.wire.vault import Vault
from workers import metrics
from workers.archive import Archive

_PART_BYTES = 512 << 20
_STAGING_S = 600
_ATTEMPTS = 3  # a full store evicts by a sample of ages, and can take what is just being written
_FULL = "the snapshot store is full: delete contexts, or give it more memory"


class SnapshotStore:
    """Put, get and remove snapshots."""

    def __init__(
        self,
        client: redis.Redis,
        chunk_bytes: int,
        part_bytes: int = _PART_BYTES,
        vault: Vault | None = None,
        archive: Archive | None = None,
    ) -> None:
        self._redis, self._vault, self.archive = client, vault or Vault(), archive
        self._chunk_bytes = chunk_bytes
        self._part_bytes = part_bytes

    def put(self, context_id: str, packed: Packed, expire_at: float | None) -> None:
        """Publish a snapshot, replacing an earlier one.

        Args:
            context_id: whose snapshot it is.
            packed: manifest and blobs.
            expire_at: Unix time in seconds, or None for never.

        Raises:
            StoreFull: if the store has no room; nothing is published then.
        """
        for _ in range(_ATTEMPTS):
            with metrics.STORE_SECONDS.time():
                published = self._publish(context_id, packed, expire_at)
            if published:
                return
        raise StoreFull(_FULL)

    def _publish(self, context_id: str, packed: Packed, expire_at: float | None) -> bool:
        """Write and publish; False if the store evicted a part meanwhile."""
        token = uuid.uuid4().hex
        parts = split_layers([len(blob) for blob in packed.blobs], self._part_bytes)
        staged = [keys.staging(context_id, token, part) for part in range(len(parts))]
        try:
            n_fields = [self._write(context_id, key, packed, layers) for key, layers in zip(staged, parts, strict=True)]
            manifest = self._vault.seal(packed.manifest, context_id, "m")
            self._redis.hset(staged[0], mapping={"m": manifest, "parts": len(parts)})
            n_fields[0] += 1
            if [self._redis.hlen(key) for key in staged] != n_fields:
                return False
            pipe: Any
            with self._redis.pipeline(transaction=True) as pipe:
                for part, key in reversed(list(enumerate(staged))):
                    target = keys.snapshot(context_id, part)
                    pipe.execute_command("RENAME", key, target)  # `rename` is refused for clusters, though slots agree
                    if expire_at is not None:
                        pipe.pexpireat(target, int(expire_at * 1000))
                    else:
                        pipe.persist(target)
                pipe.execute()
            return True
        except redis.OutOfMemoryError as error:
            raise StoreFull(_FULL) from error
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return False  # evicted after it was counted
        finally:
            self._redis.unlink(*staged)

    def _write(self, context_id: str, key: str, packed: Packed, layers: range) -> int:
        """Write whole layers; the number of fields."""
        n_fields = 1
        for layer in layers:
            for piece, start in enumerate(range(0, len(packed.blobs[layer]), self._chunk_bytes)):
                field = f"{layer}.{piece}"
                data = packed.blobs[layer][start : start + self._chunk_bytes]
                self._redis.hset(key, field, self._vault.seal(data, context_id, field))
                n_fields += 1
            self._redis.expire(key, _STAGING_S)
        self._redis.hset(key, "m", b"")
        self._redis.expire(key, _STAGING_S)
        return n_fields

    def origin(self, context_id: str) -> str:
        """Where a snapshot will be read from: "store" or "archive"."""
        if self.archive is None or self._redis.exists(keys.snapshot(context_id)):
            return "store"
        return "archive"

    def manifest(self, context_id: str) -> bytes:
        """The sealed manifest.

        Raises:
            SnapshotMissing: if there is no snapshot, or it expired or was evicted.
            SnapshotCorrupt: if it cannot be decrypted.
        """
        found: Any = self._redis.hget(keys.snapshot(context_id), "m")
        if not found and self.archive is not None:
            return self.archive.manifest(context_id)
        if not found:
            raise SnapshotMissing("the snapshot is not in the store any more")
        return self._vault.unseal(bytes(found), context_id, "m")

    def blobs(self, context_id: str, sizes: list[int]) -> Iterator[bytes]:
        """Blobs in layer order, one layer at a time.

        Raises:
            SnapshotMissing: if the snapshot goes while it is being read.
            SnapshotCorrupt: if a piece cannot be decrypted.
        """
        parts = split_layers(sizes, self._part_bytes)
        for part, layers in enumerate(parts):
            for layer in layers:
                yield self._read(context_id, part, layer, sizes[layer])

    def _read(self, context_id: str, part: int, layer: int, size: int) -> bytes:
        key, blob = keys.snapshot(context_id, part), bytearray()
        piece = 0
        while len(blob) < size:  # the writer's pieces may have another size than ours
            field = f"{layer}.{piece}"
            found: Any = self._redis.hget(key, field)
            if not found:
                break  # the length will show it
            blob += self._vault.unseal(bytes(found), context_id, field)
            piece += 1
        if len(blob) < size and not self._redis.exists(key):
            if self.archive is not None:
                return self.archive.blob(context_id, layer)
            raise SnapshotMissing("the snapshot expired or was evicted while it was being read")
        return bytes(blob)

    def extend(self, context_id: str, expire_at: float) -> None:
        """Let a snapshot live until then."""
        n_parts: Any = self._redis.hget(keys.snapshot(context_id), "parts")
        for part in range(int(n_parts or 1)):
            self._redis.pexpireat(keys.snapshot(context_id, part), int(expire_at * 1000))

    def remove(self, context_id: str) -> None:
        """Take a snapshot away."""
        n_parts: Any = self._redis.hget(keys.snapshot(context_id), "parts")
        self._redis.unlink(*(keys.snapshot(context_id, part) for part in range(int(n_parts or 1))))


def split_layers(sizes: list[int], limit: int) -> list[range]:
    """Runs of layers whose blobs stay within `limit` bytes together; a larger layer stands alone."""
    runs, start, total = [], 0, 0
    for layer, size in enumerate(sizes):
        if total + size > limit and layer > start:
            runs.append(range(start, layer))
            start, total = layer, 0
        total += size
    return [*runs, range(start, len(sizes))]
