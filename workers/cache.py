"""Where an answer's snapshot comes from: the device, the store, or, in any doubt, the source tokens again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import structlog
import torch
from torch import Tensor

from precis.codecs import Codec
from precis.compose import N_AGAIN, Part, compose, fingerprint_of
from precis.container import codecs_of
from precis.core import Snapshot
from precis.engine import nothing_read
from precis.errors import SnapshotError
from precis.fingerprint import of_context
from precis.manifest import open_manifest
from precis.reader import check_manifest, unpack
from precis.wire.records import ContextRecord
from workers import metrics
from workers.memory import Arena
from workers.models import Served
from workers.records import Records
from workers.snapshots import SnapshotStore

_HOST = torch.device("cpu")


@dataclass(slots=True)
class SnapshotCache:
    """Snapshots on the device, least recently used out first, then beside it in the host's memory.

    A snapshot in use lives on in its sessions.

    Attributes:
        limit_bytes: of snapshots that are held on the device.
        arena: memory for what is loaded, or None for new memory every time.
        host_bytes: of snapshots that are held beside it; 0 where the device is the host.
        nothing: what prompts that stand on no context share.
    """

    served: Served
    records: Records
    store: SnapshotStore
    seal_key: bytes
    limit_bytes: int
    arena: Arena | None = None
    host_bytes: int = 0
    _hot: OrderedDict[str, Snapshot] = field(default_factory=OrderedDict)
    _beside: OrderedDict[str, Snapshot] = field(default_factory=OrderedDict)
    nothing: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        self.nothing = nothing_read(self.served.model)

    @property
    def hot_ids(self) -> list[str]:
        """Contexts whose snapshots are held."""
        return [*self._hot, *self._beside]

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """What snapshots are read with."""
        return codecs_of(self.served.model)

    @property
    def take(self) -> Callable[[int], Tensor] | None:
        """Where memory for a snapshot comes from."""
        return None if self.arena is None else self.arena.take

    def find(self, record: ContextRecord) -> tuple[Snapshot, str]:
        """The snapshot and its origin, "memory", "host", "store" or "archive".

        Raises:
            SnapshotMissing, SnapshotCorrupt, SnapshotStale: if it must be made again.
        """
        fingerprint = self.expected(record)
        held = self._hot.get(record.id)
        if held is not None and held.header.fingerprint == fingerprint:
            self._hot.move_to_end(record.id)
            metrics.LOADS.labels("memory").inc()
            return held, "memory"
        beside = self._beside.pop(record.id, None)
        if beside is not None and beside.header.fingerprint == fingerprint:
            snapshot = beside.to(self.served.model.device)
            self.keep(record.id, snapshot)
            metrics.LOADS.labels("host").inc()
            return snapshot, "host"
        origin = self.store.origin(record.id)
        try:
            snapshot = self._load(record, fingerprint)
        except SnapshotError as error:
            metrics.LOAD_FAILURES.labels(error.code.removeprefix("snapshot_")).inc()
            structlog.get_logger("cache").warning(
                "snapshot_unusable", context=record.id, code=error.code, why=error.detail
            )
            raise
        self.keep(record.id, snapshot)
        metrics.LOADS.labels(origin).inc()
        return snapshot, origin

    def together(self, ids: Sequence[str], parts: Sequence[Part]) -> tuple[Snapshot, int]:
        """Several snapshots as one, and how many tokens were read for that; held like any other."""
        name = "+".join(ids)
        wanted = reduce(lambda one, other: fingerprint_of([one, other]), (p.snapshot.header.fingerprint for p in parts))
        held = self._hot.get(name)
        if held is not None and held.header.fingerprint == wanted:
            self._hot.move_to_end(name)
            return held, 0
        made = compose(self.served.model, self.served.rotary, parts)
        self.keep(name, made)
        return made, sum(min(N_AGAIN, len(part.token_ids)) for part in parts[1:])

    def load_ahead(self, context_id: str) -> str:
        """Load a snapshot nobody asks for yet; says what became of it.

        One that cannot be used is made again when somebody asks.
        """
        record = self.records.get(context_id)
        if record is None or record.status != "ready":
            return "gone"
        try:
            return self.find(record)[1]
        except SnapshotError as error:
            return error.code

    def expected(self, record: ContextRecord) -> str:
        """The fingerprint that this worker's model gives the record's tokens and policy.

        Raises:
            SnapshotMissing: if the source tokens are gone, so that nothing can be verified.
        """
        tokens = self.records.raw_tokens(record)
        return of_context(self.served.card.digest, tokens, record.compression.parameters())

    def keep(self, context_id: str, snapshot: Snapshot) -> None:
        """Hold a snapshot on the device, if it fits at all; what has to give way goes to the host's memory."""
        self._beside.pop(context_id, None)
        self._hot[context_id] = snapshot
        self._hot.move_to_end(context_id)
        while self._hot and _bytes(self._hot) > self.limit_bytes:
            gone, coldest = self._hot.popitem(last=False)
            if coldest.n_bytes <= self.host_bytes:
                self._beside[gone] = coldest.to(_HOST)
        while _bytes(self._beside) > self.host_bytes:
            self._beside.popitem(last=False)
        self._tell()

    def drop(self, context_id: str) -> None:
        """Let a snapshot go."""
        self._hot.pop(context_id, None)
        self._beside.pop(context_id, None)
        self._tell()

    def _tell(self) -> None:
        metrics.HOT_BYTES.labels("device").set(_bytes(self._hot))
        metrics.KV_USAGE.set(_bytes(self._hot) / max(1, self.limit_bytes))
        metrics.HOT_BYTES.labels("host").set(_bytes(self._beside))

    def _load(self, record: ContextRecord, fingerprint: str) -> Snapshot:
        model = self.served.model
        began = time.monotonic()
        manifest = open_manifest(self.store.manifest(record.id), self.seal_key)
        check_manifest(manifest, model.geometry, fingerprint, self.codecs)
        fetching = Fetching(self.store.blobs(record.id, manifest.blob_bytes), time.monotonic() - began)
        snapshot = unpack(manifest, fetching, model, self.served.rotary, self.codecs, self.take)
        metrics.LOADED_BYTES.inc(sum(manifest.blob_bytes))
        metrics.LOAD_SECONDS.labels("fetch").observe(fetching.seconds)
        metrics.LOAD_SECONDS.labels("decode").observe(time.monotonic() - began - fetching.seconds)
        return snapshot


@dataclass(slots=True)
class Fetching:
    """Blobs, and the seconds that they were waited for."""

    blobs: Iterator[bytes]
    seconds: float

    def __iter__(self) -> Iterator[bytes]:
        """Itself."""
        return self

    def __next__(self) -> bytes:
        """The next one."""
        began = time.monotonic()
        try:
            return next(self.blobs)
        finally:
            self.seconds += time.monotonic() - began


def _bytes(held: OrderedDict[str, Snapshot]) -> int:
    return sum(snapshot.n_bytes for snapshot in held.values())
