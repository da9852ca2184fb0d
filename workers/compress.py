"""Handle a CompressJob: tokens -> snapshot in the store -> record ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis
import torch

from precis.container import codecs_of
from precis.core import Snapshot
from precis.errors import ContextNotFound, OutOfMemory, SnapshotStale
from precis.full_cache import Between
from precis.pipeline import compress, document_of
from precis.sizes import head_bytes, layer_bytes
from precis.text import ContextPart
from precis.wire import traces
from precis.wire.messages import ProgressEvent, ReadyEvent
from precis.wire.presets import HEADS, TRANSFORM
from precis.wire.records import ContextRecord, FidelityRecord
from workers import metrics
from workers.events import emit
from workers.models import Served
from workers.records import Records
from workers.reuse import Made, Reuse
from workers.snapshots import SnapshotStore

_PROGRESS_S = 0.25
_STATUS_OF_STAGE = {
    "prefill": "prefilling",
    "score": "compressing",
    "search": "compressing",
    "tighten": "compressing",
    "encode": "compressing",
}


@dataclass(slots=True)
class Progress:
    """Tells clients how far a compression is, at most four times a second, and notes when each stage began."""

    client: redis.Redis
    records: Records
    record: ContextRecord
    began: dict[str, float] = field(default_factory=dict)
    _told: float = 0.0
    _stage: str = ""

    def tell(self, stage: str, done: int, total: int) -> None:
        """As `Between`."""
        now = time.monotonic()
        if stage != self._stage:
            self.began[stage] = now
        elif now - self._told < _PROGRESS_S:
            return
        self._stage, self._told = stage, now
        status = _STATUS_OF_STAGE.get(stage, stage)
        changes: dict[str, Any] = {"status": status}
        if stage == "prefill":
            changes["processed"] = done
        self.records.mark(self.record, **changes)
        emit(self.client, self.record.id, ProgressEvent(status, stage, done, total))


@dataclass(frozen=True, slots=True)
class Compressor:
    """Makes snapshots, for CompressJobs and for answers whose snapshot cannot be used."""

    served: Served
    client: redis.Redis
    records: Records
    store: SnapshotStore
    seal_key: bytes

    def run(self, record: ContextRecord, between: Between, still_ours: Callable[[], bool]) -> Snapshot:
        """Compress a queued context and publish it.

        Args:
            record: of the context.
            between: called between chunks; raises to stop.
            still_ours: asked before publishing; a job that another worker took over is not published.
        """
        started = time.monotonic()
        progress = Progress(self.client, self.records, record)

        def tell(stage: str, done: int, total: int) -> None:
            between(stage, done, total)
            progress.tell(stage, done, total)

        made = self.make(record, tell, same=True)
        compressed_at = time.monotonic()
        if not still_ours():
            return made.snapshot
        progress.tell("storing", 0, made.packed.n_bytes)
        self.publish(record, made)
        stored_at = time.monotonic()
        began = progress.began
        scoring = next((began[stage] for stage in ("score", "search", "encode", "tighten") if stage in began), started)
        queued_at = record.queued_at or record.created_at
        timings = {
            "queue_ms": max(0.0, (time.time() - queued_at - (stored_at - started)) * 1000),
            "prefill_ms": (scoring - began.get("prefill", scoring)) * 1000,
            "compress_ms": (compressed_at - scoring) * 1000,
            "store_ms": (stored_at - compressed_at) * 1000,
        }
        self.mark_ready(record, made, timings)
        about = {"precis.tokens": record.n_tokens, "precis.stored_bytes": made.packed.n_bytes}
        traces.past(
            "snapshot", None, {name: timings[name] for name in ("prefill_ms", "compress_ms", "store_ms")}, "", **about
        )
        for name, value in timings.items():
            metrics.STAGE_SECONDS.labels(name.removesuffix("_ms")).observe(value / 1000)
        return made.snapshot

    def make(self, record: ContextRecord, between: Between, *, same: bool = False) -> Made:
        """Compress a context's source tokens, or make its snapshot of a stored one if that can be.

        Args:
            record: of the context.
            between: called between chunks; raises to stop.
            same: whether a stored snapshot that is just the wanted one is taken over.

        Raises:
            SnapshotMissing: if the source tokens are gone.
            SnapshotStale: if they were made by another tokenizer.
            OutOfMemory: if the device has no room for the full cache.
        """
        served = self.served
        if record.tokenizer_digest != served.card.tokenizer_digest:
            raise SnapshotStale("the context was made with another tokenizer or chat template: upload it again")
        how, found = record.compression, served.model.artifacts
        if how.artifact not in ("", found.get(HEADS)) or how.transform not in ("", found.get(TRANSFORM)):
            raise SnapshotStale(
                "the context was made with another calibration of the model than there is now: upload it again"
            )
        tokens = self.records.raw_tokens(record)
        reuse = Reuse(served, self.records, self.store, self.seal_key)
        if (made_of_stored := reuse.of(record, tokens, between, same=same)) is not None:
            return made_of_stored
        token_ids = np.frombuffer(tokens, "<i4").tolist()
        part = ContextPart(token_ids, record.body, tuple(record.roles))
        try:
            made = compress(
                served.model,
                served.rotary,
                document_of(served.prompter, part, record.compression.probes),
                record.compression,
                self.seal_key,
                between,
            )
            classes = made.classes if record.compression.keep_ratio == 1.0 else None
            return Made(made.packed, made.snapshot, made.raw_bytes, made.fidelity, classes)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the device has no room for the full cache of {record.n_tokens} tokens") from error

    def publish(self, record: ContextRecord, made: Made) -> None:
        """Store a snapshot with the record's present expiry.

        Raises:
            ContextNotFound: if the context was deleted meanwhile; nothing is left behind then.
        """
        current = self.records.get(record.id)
        if current is None:
            raise ContextNotFound(f"context {record.id} was deleted")
        self.store.put(record.id, made.packed, None if current.pinned else current.expire_at)
        if self.records.get(record.id) is None:
            self.store.remove(record.id)
            raise ContextNotFound(f"context {record.id} was deleted")
        if self.store.archive is not None:
            self.store.archive.put(record.id, made.packed)

    def mark_ready(self, record: ContextRecord, made: Made, timings: dict[str, float]) -> None:
        """Record what was made; from now on the context can be asked."""
        snapshot, packed, found = made.snapshot, made.packed, made.fidelity
        g = snapshot.geometry
        codec = codecs_of(self.served.model)[record.compression.codec]
        heads = head_bytes(snapshot, codec, packed.blobs)
        counts = (snapshot.offsets[1:] - snapshot.offsets[:-1]).reshape(g.n_layers, g.n_kv_heads).tolist()
        self.records.mark(
            record,
            made.retention,
            status="ready",
            processed=record.n_tokens,
            raw_bytes=made.raw_bytes,
            stored_bytes=packed.n_bytes,
            fidelity=None if found is None else FidelityRecord(found.kl, found.top1_agreement, found.n_tokens),
            timings={name: round(value, 3) for name, value in timings.items()},
            head_counts=counts,
            head_bytes=heads,
            layer_bytes=layer_bytes(heads, codec, packed.blobs),
        )
        kinds = {"raw": made.raw_bytes, "stored": packed.n_bytes, "saved": max(0, made.raw_bytes - packed.n_bytes)}
        for kind, n_bytes in kinds.items():
            metrics.STORED_BYTES.labels(kind).inc(n_bytes)
        metrics.RATIO.observe(made.raw_bytes / packed.n_bytes)
        metrics.CONTEXT_TOKENS.observe(record.n_tokens)
        if found is not None:
            metrics.FIDELITY.observe(found.kl)
        emit(self.client, record.id, ReadyEvent())
