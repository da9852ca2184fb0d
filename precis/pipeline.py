"""The page to read first: a document becomes a small snapshot; a query is answered on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from precis.container import CODECS, Packed, check_manifest, open_manifest, pack, unpack
from precis.core import Snapshot, SnapshotHeader
from precis.engine import Feed, Session, step
from precis.families import Model, Rotary
from precis.fidelity import Fidelity, measure
from precis.fingerprint import of_context
from precis.full_cache import Between, Document, silent
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.protection import check_budget, protected_spans
from precis.sampling import Sampled, Sampler
from precis.selection import choose, gather, protected_mask, score
from precis.text import ContextPart, Prompter
from precis.views import View
from precis.wire.presets import PRESETS, Compression


@dataclass(frozen=True, slots=True)
class Compressed:
    """What `compress` gives.

    Attributes:
        packed: the bytes to store.
        snapshot: the same snapshot as it will be after loading.
        raw_bytes: of the full cache in 16 bits.
        fidelity: measured against the full cache.
    """

    packed: Packed
    snapshot: Snapshot
    raw_bytes: int
    fidelity: Fidelity


def compress(
    model: Model, rotary: Rotary, document: Document, how: Compression, key: bytes = b"", between: Between = silent
) -> Compressed:
    """Read a document once and keep what matters.

    Args:
        model: from `attention.plug.attach`.
        rotary: of the model.
        document: T tokens.
        how: policy, kept share and codec.
        key: seals the snapshot, if not empty.
        between: called between chunks of work with (stage, done, total); may raise to stop.

    Raises:
        BudgetTooSmall: if the tokens that are always kept exceed the budget.
    """
    policy = POLICIES[how.policy]
    per_head = check_budget(document.n_tokens, how, document.protected)
    spans = protected_spans(document.n_tokens, how, document.protected)
    protected = protected_mask(document.n_tokens, spans, model.device)

    full = prefill(model, rotary, document, policy.needs, between)
    scores = score(full, policy)
    selection = choose(full, scores, policy, protected, per_head)
    kept = gather(full, selection, header_of(model, document, how))
    between("encode", 0, 1)
    packed = pack(kept, CODECS[how.codec], rotary, key)
    snapshot = load(model, rotary, packed, kept.header.fingerprint, key)
    fidelity = measure(model, document, full, snapshot)
    return Compressed(packed, snapshot, model.geometry.raw_bytes(document.n_tokens), fidelity)


def document_of(prompter: Prompter, part: ContextPart) -> Document:
    """A context's tokens with what the library must know of them.

    Args:
        prompter: of the model; says how a repetition is asked for.
        part: rendered and tokenized.
    """
    first, (opening, closing) = prompter.repeat_parts(part.roles)
    return Document(
        token_ids=torch.tensor(part.token_ids, dtype=torch.int64),
        body=part.body,
        protected=tuple(part.protected),
        repeat_first=tuple(first),
        repeat_next=(tuple(opening), tuple(closing)),
    )


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


def load(model: Model, rotary: Rotary, packed: Packed, fingerprint: str, key: bytes = b"") -> Snapshot:
    """Bytes -> snapshot on the model's device.

    Raises:
        SnapshotCorrupt: if a byte is wrong.
        SnapshotStale: if it is another snapshot than `fingerprint` asks for.
    """
    manifest = open_manifest(packed.manifest, key)
    check_manifest(manifest, model.geometry, fingerprint)
    return unpack(manifest, packed.blobs, model.geometry, rotary, model.device, model.dtype)


def answer(
    model: Model, snapshot: Snapshot, token_ids: Sequence[int], sampler: Sampler, n_max: int, view: View | None = None
) -> Iterator[Sampled]:
    """Answer one query, token by token; the caller stops at an end token.

    Args:
        model: from `attention.plug.attach`.
        snapshot: shared; it is only read.
        token_ids: the query part, at least one token.
        sampler: greedy or not.
        n_max: tokens at most.
        view: which entries to read while decoding, or None for all.
    """
    session = Session.on(snapshot, view)
    logits = step(model, [Feed(session, token_ids, last=True)])[0]
    for _ in range(n_max):
        sampled = sampler.sample(logits[-1])
        yield sampled
        logits = step(model, [Feed(session, [sampled.token_id])])[0]
