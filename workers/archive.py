"""Snapshots beyond the store's memory: an object each, in S3, Google Cloud Storage, Azure or a folder, by `obstore`.

What the store evicted is read from here instead of being made again. An object is `PRECISA1`, the number of its parts,
their lengths, and the parts: manifest and blobs, encrypted as in the store. It is written in the background; the set
ARCHIVED names its context before that, so that whoever deletes the context leaves word of it, and the object goes.
"""

from __future__ import annotations

import os
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate
from typing import Any

import redis
import structlog

from precis.container import Packed
from precis.errors import SnapshotCorrupt, SnapshotMissing
from precis.wire import keys
from precis.wire.vault import Vault
from workers import metrics

_MAGIC = b"PRECISA1"
_HEAD = struct.Struct("<8sI")
_FIRST_BYTES = 64 << 10  # read at once: header, and mostly the manifest
_MOST_PARTS = 4096
_SWEEP_S, _SWEPT = 5.0, 64


class Archive:
    """Put, read and remove archived snapshots."""

    def __init__(self, url: str, client: redis.Redis, vault: Vault) -> None:
        """Open an archive.

        Raises:
            SystemExit: if `obstore` is not installed, or the URL is none that it knows.
        """
        try:
            import obstore  # noqa: PLC0415 — an extra
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            raise SystemExit("PRECIS_ARCHIVE_URL needs pip install 'precis-kv[archive]'") from error
        self._obstore: Any = obstore
        options: dict[str, Any] = {"mkdir": True}
        if not url.startswith("file:"):
            plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"  # lost where client options are given
            options = {
                "client_options": {"timeout": "60s", "connect_timeout": "3s", "allow_http": plain},
                "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=20)},
            }
        try:
            self._objects: Any = from_url(url, **options)
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise SystemExit(f"PRECIS_ARCHIVE_URL: {str(error).splitlines()[0]}") from error
        self._redis, self._vault = client, vault
        self._log = structlog.get_logger("archive")
        self._pool = ThreadPoolExecutor(1, "archive")
        self._stopping = threading.Event()
        self._ends: dict[str, list[int]] = {}  # of the context read last: where its parts end

    def start(self) -> None:
        """Begin to remove what is left of deleted contexts."""
        threading.Thread(target=self._sweep_forever, name="archive-sweep", daemon=True).start()

    def close(self) -> None:
        """Finish what is being written."""
        self._stopping.set()
        self._pool.shutdown(wait=True)

    def put(self, context_id: str, packed: Packed) -> Future[bool]:
        """Write a snapshot in the background; whether it came to that."""
        self._redis.sadd(keys.ARCHIVED, context_id)
        return self._pool.submit(self._put, context_id, packed)

    def _put(self, context_id: str, packed: Packed) -> bool:
        sealed = [
            self._vault.seal(part, context_id, f"archive.{index}")
            for index, part in enumerate([packed.manifest, *packed.blobs])
        ]
        head = _HEAD.pack(_MAGIC, len(sealed)) + struct.pack(f"<{len(sealed)}Q", *map(len, sealed))
        try:
            self._objects.put(_name(context_id), b"".join([head, *sealed]))
            if self._redis.hget(keys.context(context_id), "status") in (None, b'"failed"'):  # deleted meanwhile
                self._delete(context_id)
                self._redis.srem(keys.ARCHIVED, context_id)
        except (self._obstore.exceptions.BaseError, OSError, redis.RedisError) as error:
            self._failed("put", context_id, error)
            return False
        metrics.ARCHIVED_BYTES.inc(sum(map(len, sealed)))
        return True

    def manifest(self, context_id: str) -> bytes:
        """The sealed manifest.

        Raises:
            SnapshotMissing: if there is none, or the archive cannot be reached.
            SnapshotCorrupt: if it cannot be what was written.
        """
        first = self._range(context_id, 0, _FIRST_BYTES)
        n_parts = _HEAD.unpack_from(first)[1] if first[:8] == _MAGIC and len(first) >= _HEAD.size else 0
        start = _HEAD.size + 8 * n_parts
        if not 0 < n_parts <= _MOST_PARTS or len(first) < start:
            raise SnapshotCorrupt("the archived snapshot does not begin as one")
        lengths = struct.unpack_from(f"<{n_parts}Q", first, _HEAD.size)
        self._ends = {context_id: list(accumulate(lengths, initial=start))}
        return self._part(context_id, 0, first)

    def blob(self, context_id: str, layer: int) -> bytes:
        """One blob.

        Raises:
            SnapshotMissing, SnapshotCorrupt: as `manifest`.
        """
        if context_id not in self._ends:
            self.manifest(context_id)
        return self._part(context_id, layer + 1)

    def _part(self, context_id: str, index: int, known: bytes = b"") -> bytes:
        ends = self._ends[context_id]
        if index + 1 >= len(ends):
            raise SnapshotCorrupt("the archived snapshot has fewer parts than its manifest says")
        start, stop = ends[index], ends[index + 1]
        data = known[start:stop] if stop <= len(known) else self._range(context_id, start, stop)
        return self._vault.unseal(data, context_id, f"archive.{index}")

    def _range(self, context_id: str, start: int, stop: int) -> bytes:
        if stop == start:
            return b""
        try:
            return bytes(self._objects.get_range(_name(context_id), start=start, end=stop))
        except FileNotFoundError:
            raise SnapshotMissing("the snapshot is neither in the store nor in the archive any more") from None
        except (self._obstore.exceptions.BaseError, OSError) as error:
            self._failed("get", context_id, error)
            raise SnapshotMissing("the snapshot is not in the store, and the archive cannot be read") from error

    def sweep(self) -> int:
        """Remove objects of contexts that are gone; how many."""
        gone: Any = self._redis.srandmember(keys.UNARCHIVED, _SWEPT)
        for raw in gone:
            self._delete(raw.decode())
            self._redis.srem(keys.UNARCHIVED, raw)
        return len(gone)

    def _delete(self, context_id: str) -> None:
        try:
            self._objects.delete(_name(context_id))
        except FileNotFoundError:
            return

    def _sweep_forever(self) -> None:
        while not self._stopping.wait(_SWEEP_S):
            try:
                self.sweep()
            except (self._obstore.exceptions.BaseError, OSError, redis.RedisError) as error:
                self._failed("delete", "", error)  # it is tried again

    def _failed(self, what: str, context_id: str, error: Exception) -> None:
        metrics.ARCHIVE_FAILURES.labels(what).inc()
        why = str(error).splitlines()[0]
        self._log.warning("archive_failed", what=what, context=context_id, why=why)


def _name(context_id: str) -> str:
    return f"snapshots/{context_id}"
