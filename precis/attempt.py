"""A document that was read and scored, to be cut and coded at any budget without another pass over the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from precis.codecs import Codec, informed
from precis.codecs import needs as needs_of_codec
from precis.container import CODECS, Packed, codecs_of, pack
from precis.core import Prefill, Snapshot, SnapshotHeader
from precis.families import Model, Rotary
from precis.fidelity import Fidelity, measure
from precis.fingerprint import of_context
from precis.full_cache import Document
from precis.observations import Observation
from precis.observations.fisher import RepeatGradients
from precis.observations.repeat import RepeatAttention
from precis.policies import POLICIES
from precis.protection import count_protected, protected_spans
from precis.reader import load
from precis.selection import choose, gather, merge, protected_mask, ranks_of
from precis.wire.presets import PRESETS, Compression


@dataclass(frozen=True, slots=True)
class Compressed:
    """What `compress` gives.

    Attributes:
        packed: the bytes to store.
        snapshot: the same snapshot as it will be after loading.
        raw_bytes: of the full cache in 16 bits.
        fidelity: measured against the full cache.
        classes: [B, T] of `precis.rates.classes_of`, where the codec stores some tokens more finely, or None.
    """

    packed: Packed
    snapshot: Snapshot
    raw_bytes: int
    fidelity: Fidelity
    classes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One scored document, to be cut at any budget: the passes over the model are not repeated."""

    model: Model
    rotary: Rotary
    document: Document
    how: Compression
    key: bytes
    full: Prefill
    scores: Tensor

    @property
    def codec(self) -> Codec:
        """What entries are coded with."""
        return informed(codecs_of(self.model)[self.how.codec], self.full)

    def n_protected(self, per_head: int) -> int:
        """Tokens that every head keeps at this budget."""
        return count_protected(self.document.n_tokens, self.how.policy, per_head, self.document.protected)

    def cut(self, per_head: int) -> Snapshot:
        """The kept entries at `per_head` entries per kv head on average, before the codec."""
        n_tokens = self.document.n_tokens
        spans = protected_spans(n_tokens, self.how.policy, per_head, self.document.protected)
        protected = protected_mask(n_tokens, spans, self.model.device)
        policy = POLICIES[self.how.policy]
        selection = choose(self.full, self.scores, policy, protected, per_head)
        ranks = ranks_of(self.full, self.scores, policy, protected, selection) if self.how.codec != "tc" else None
        kept = gather(self.full, selection, header_of(self.model, self.document, self.how), ranks)
        if policy.merger is None:
            return kept
        return merge(kept, self.full, self.scores, policy.merger, protected, self.rotary)

    def at(self, per_head: int) -> Compressed:
        """Cut, encode, decode and measure."""
        kept = self.cut(per_head)
        return self.made(pack(kept, self.codec, self.rotary, self.key), kept)

    def made(self, packed: Packed, kept: Snapshot, classes: Tensor | None = None) -> Compressed:
        """Decode what was encoded, and measure."""
        snapshot = load(self.model, self.rotary, packed, kept.header.fingerprint, self.key)
        fidelity = measure(self.model, self.document, self.full, snapshot)
        return Compressed(packed, snapshot, self.model.geometry.raw_bytes(self.document.n_tokens), fidelity, classes)


def needs_of(how: Compression) -> tuple[Observation, ...]:
    """What has to be observed: what the policy needs, and for `tc` how a repetition reads the document."""
    codec_needs = needs_of_codec(CODECS[how.codec]) if how.codec in CODECS else ()
    needs = (*POLICIES[how.policy].needs, *codec_needs)
    if how.codec != "tc" or RepeatGradients() in needs or RepeatAttention() in needs:
        return needs
    return (*needs, RepeatAttention())


def header_of(model: Model, document: Document, how: Compression) -> SnapshotHeader:
    """What the snapshot of this document says of itself."""
    return SnapshotHeader(
        fingerprint=fingerprint_of(model.digest, document.token_ids.tolist(), how),
        n_tokens=document.n_tokens,
        next_position=document.n_tokens,
        n_sink=PRESETS[how.policy].n_sink if document.n_tokens > PRESETS[how.policy].n_sink else 0,
        policy=how.parameters(),
    )


def fingerprint_of(model_digest: str, token_ids: Sequence[int], how: Compression) -> str:
    """Fingerprint of these tokens, compressed like this, by this model."""
    return of_context(model_digest, np.asarray(token_ids, "<i4").tobytes(), how.parameters())
