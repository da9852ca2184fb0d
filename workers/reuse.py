"""What can be made of a stored snapshot without the whole document being read: the same, a smaller one, a longer one.

In any doubt nothing is, and the document is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from torch import Tensor

from precis.container import Packed, codecs_of
from precis.core import Snapshot, SnapshotHeader
from precis.errors import SnapshotError, SnapshotMissing
from precis.fidelity import Fidelity
from precis.fingerprint import of_context
from precis.full_cache import Between
from precis.grow import Stored, grow
from precis.manifest import Manifest, open_manifest
from precis.pipeline import document_of
from precis.protection import budget_per_head, count_protected
from precis.reader import check_manifest, levels_in, load
from precis.retention import kept_shares, precisions
from precis.text import ContextPart
from precis.tighten import tighten
from precis.wire.presets import Compression
from precis.wire.records import ContextRecord
from workers import metrics
from workers.models import Served
from workers.records import Records
from workers.snapshots import SnapshotStore


@dataclass(frozen=True, slots=True)
class Made:
    """A snapshot to be published.

    Attributes:
        fidelity: None of a snapshot made of a stored one: the full cache to compare it with is long gone.
        classes: see `precis.attempt.Compressed`; None where not everything is kept.
        told: what was kept of each token, where that is known from elsewhere.
    """

    packed: Packed
    snapshot: Snapshot
    raw_bytes: int
    fidelity: Fidelity | None
    classes: Tensor | None = None
    told: bytes = b""

    @property
    def retention(self) -> bytes:
        """See `precis.wire.keys.retention`."""
        if self.told:
            return self.told
        return b"k" + kept_shares(self.snapshot) if self.classes is None else b"p" + precisions(self.classes)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Looks at what is stored under a context's id."""

    served: Served
    records: Records
    store: SnapshotStore
    seal_key: bytes

    def of(self, record: ContextRecord, tokens: bytes, between: Between, *, same: bool) -> Made | None:
        """What a wanted snapshot can be made of, or None.

        Args:
            record: of the context.
            tokens: of all of its document.
            between: called between chunks of work.
            same: whether a snapshot that is just the wanted one is taken over.
        """
        served, how = self.served, record.compression
        try:
            sealed = self.store.manifest(record.id)
            manifest = open_manifest(sealed, self.seal_key)
            n_bytes = 4 * manifest.n_tokens
            before = of_context(served.card.digest, tokens[:n_bytes], manifest.policy)
            check_manifest(manifest, served.model.geometry, before, codecs_of(served.model))
            n_levels = [sum(map(sum, manifest.counts))] if manifest.ranked else []
            blobs = tuple(self.store.blobs(record.id, [*manifest.blob_bytes, *n_levels]))
            if manifest.ranked:
                levels_in(manifest, blobs)
            if n_bytes < len(tokens):
                return self._grown(record, tokens, Stored(manifest, blobs), between)
            if manifest.policy == how.parameters():
                return self._adopted(record, Packed(sealed, blobs)) if same else None
            return self._tightened(record, tokens, manifest, blobs, between)
        except SnapshotMissing:  # the usual case: it is made for the first time
            return None
        except (SnapshotError, ValueError) as error:
            structlog.get_logger("worker").info("not_reused", context=record.id, why=str(error))
            return None

    def _adopted(self, record: ContextRecord, packed: Packed) -> Made:
        """A snapshot that lies there already, every byte of it: an imported one."""
        served, known = self.served, record.fidelity
        fingerprint = open_manifest(packed.manifest, self.seal_key).fingerprint
        snapshot = load(served.model, served.rotary, packed, fingerprint, self.seal_key)
        fidelity = None if known is None else Fidelity(known.kl, known.top1_agreement, known.n_tokens)
        metrics.REUSED.labels("adopted").inc()
        raw_bytes = served.model.geometry.raw_bytes(record.n_tokens)
        return Made(packed, snapshot, raw_bytes, fidelity, told=self.records.retention(record))

    def _tightened(
        self, record: ContextRecord, tokens: bytes, manifest: Manifest, blobs: Sequence[bytes], between: Between
    ) -> Made | None:
        """The same document cut down to a smaller budget of the same policy."""
        served, how, geometry = self.served, record.compression, self.served.model.geometry
        if not manifest.ranked or how.searches or not _looser(manifest.policy, how):
            return None
        between("tighten", 0, 1)
        per_head = budget_per_head(record.n_tokens, how)
        now = of_context(served.card.digest, tokens, how.parameters())
        header = SnapshotHeader(now, record.n_tokens, record.n_tokens, manifest.n_sink, how.parameters())
        n_protected = count_protected(record.n_tokens, how.policy, per_head, record.protected)
        packed = tighten(manifest, blobs, geometry, per_head, n_protected, header, self.seal_key)
        snapshot = load(served.model, served.rotary, packed, now, self.seal_key)
        metrics.REUSED.labels("tightened").inc()
        return Made(packed, snapshot, geometry.raw_bytes(record.n_tokens), None)

    def _grown(self, record: ContextRecord, tokens: bytes, stored: Stored, between: Between) -> Made | None:
        """The snapshot of a longer document."""
        served, how = self.served, record.compression
        if stored.manifest.policy != how.parameters():
            return None
        part = ContextPart(np.frombuffer(tokens, "<i4").tolist(), record.body, tuple(record.roles))
        document = document_of(served.prompter, part)
        packed, snapshot, classes = grow(served.model, served.rotary, document, how, stored, self.seal_key, between)
        metrics.REUSED.labels("grown").inc()
        return Made(packed, snapshot, served.model.geometry.raw_bytes(record.n_tokens), None, classes)


def _looser(policy: dict[str, str | int | float], how: Compression) -> bool:
    """Whether a snapshot's policy differs from a wanted one by its budget only."""
    bounds = ("keep_ratio", "max_bytes", "max_kl")
    theirs = {name: value for name, value in policy.items() if name not in bounds}
    ours = {name: value for name, value in how.parameters().items() if name not in bounds}
    return theirs == ours and policy != how.parameters()
