"""Where an answer's snapshot comes from: the device, the store, or, in any doubt, the source tokens again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from torch import Tensor

from precis.codecs import Codec
from precis.container import codecs_of
from precis.core import Snapshot
from precis.errors import SnapshotError
from precis.fingerprint import of_context
from precis.manifest import open_manifest
from precis.reader import check_manifest, unpack
from precis.wire.messages import ContextRecord
from workers import metrics
from workers.memory import Arena
from workers.models import Served
from workers.records import Records
from workers.snapshots import SnapshotStore


@dataclass(slots=True)
class SnapshotCache:
    """Snapshots on the device, least recently used out first; a snapshot in use lives on in its sessions.

    Attributes:
        limit_bytes: of snapshots that are held.
        arena: memory for what is loaded, or None for new memory every time.
    """

    served: Served
    records: Records
    store: SnapshotStore
    seal_key: bytes
    limit_bytes: int
    arena: Arena | None = None
    _hot: OrderedDict[str, Snapshot] = field(default_factory=OrderedDict)

    @property
    def hot_ids(self) -> list[str]:
        """Contexts whose snapshots are on the device."""
        return list(self._hot)

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """What snapshots are read with."""
        return codecs_of(self.served.model)

    @property
    def take(self) -> Callable[[int], Tensor] | None:
        """Where memory for a snapshot comes from."""
        return None if self.arena is None else self.arena.take

    def find(self, record: ContextRecord) -> tuple[Snapshot, str]:
        """The snapshot and its origin, "memory" or "store".

        Raises:
            SnapshotMissing, SnapshotCorrupt, SnapshotStale: if it must be made again.
        """
        fingerprint = self.expected(record)
        held = self._hot.get(record.id)
        if held is not None and held.header.fingerprint == fingerprint:
            self._hot.move_to_end(record.id)
            metrics.LOADS.labels("memory").inc()
            return held, "memory"
        try:
            snapshot = self._load(record, fingerprint)
        except SnapshotError as error:
            structlog.get_logger("cache").warning(
                "snapshot_unusable", context=record.id, code=error.code, why=error.detail
            )
            raise
        self.keep(record.id, snapshot)
        metrics.LOADS.labels("store").inc()
        return snapshot, "store"

    def expected(self, record: ContextRecord) -> str:
        """The fingerprint that this worker's model gives the record's tokens and policy.

        Raises:
            SnapshotMissing: if the source tokens are gone, so that nothing can be verified.
        """
        tokens = self.records.raw_tokens(record.id)
        return of_context(self.served.card.digest, tokens, record.compression.parameters())

    def keep(self, context_id: str, snapshot: Snapshot) -> None:
        """Hold a snapshot on the device, if it fits at all."""
        self._hot[context_id] = snapshot
        self._hot.move_to_end(context_id)
        while self._hot and self._bytes() > self.limit_bytes:
            self._hot.popitem(last=False)
        metrics.HOT_BYTES.set(self._bytes())

    def drop(self, context_id: str) -> None:
        """Let a snapshot go."""
        self._hot.pop(context_id, None)
        metrics.HOT_BYTES.set(self._bytes())

    def _bytes(self) -> int:
        return sum(snapshot.n_bytes for snapshot in self._hot.values())

    def _load(self, record: ContextRecord, fingerprint: str) -> Snapshot:
        model = self.served.model
        manifest = open_manifest(self.store.manifest(record.id), self.seal_key)
        check_manifest(manifest, model.geometry, fingerprint, self.codecs)
        blobs = self.store.blobs(record.id, manifest.blob_bytes)
        return unpack(manifest, blobs, model, self.served.rotary, self.codecs, self.take)
