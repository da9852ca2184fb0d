"""The page to read first: a document becomes a small snapshot; a query is answered on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from precis.container import CODECS, Packed, check_manifest, pack, unpack
from precis.core import Prefill, Snapshot, SnapshotHeader
from precis.engine import step
from precis.errors import BoundNotReached, BudgetTooSmall
from precis.families import Model, Rotary
from precis.fidelity import Fidelity, measure
from precis.fingerprint import of_context
from precis.full_cache import Between, Document, silent
from precis.manifest import open_manifest
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.protection import check_budget, count_protected, protected_spans
from precis.sampling import Sampled, Sampler
from precis.selection import choose, gather, merge, protected_mask, ranks_of, score
from precis.session import Feed, Session
from precis.sizes import packed_bytes
from precis.text import ContextPart, Prompter
from precis.views import View
from precis.wire.messages import Message
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
        BoundNotReached: if `max_kl` is below what the codec alone costs.
    """
    per_head = check_budget(document.n_tokens, how, document.protected)
    policy = POLICIES[how.policy]
    full = prefill(model, rotary, document, policy.needs, between)
    attempt = Attempt(model, rotary, document, how, key, full, score(full, policy))
    if not how.searches:
        between("encode", 0, 1)
        return attempt.at(per_head)
    lowest = next(n for n in range(1, per_head + 1) if n >= attempt.n_protected(n))
    if how.max_bytes is not None:
        return within_bytes(attempt, lowest, per_head, how.max_bytes, between)
    return within_kl(attempt, lowest, per_head, how.max_kl or 0.0, between)


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
        ranks = ranks_of(self.full, self.scores, policy, protected, selection)
        kept = gather(self.full, selection, header_of(self.model, self.document, self.how), ranks)
        if policy.merger is None:
            return kept
        return merge(kept, self.full, self.scores, policy.merger, protected, self.rotary)

    def at(self, per_head: int) -> Compressed:
        """Cut, encode, decode and measure."""
        kept = self.cut(per_head)
        packed = pack(kept, CODECS[self.how.codec], self.rotary, self.key)
        snapshot = load(self.model, self.rotary, packed, kept.header.fingerprint, self.key)
        fidelity = measure(self.model, self.document, self.full, snapshot)
        return Compressed(packed, snapshot, self.model.geometry.raw_bytes(self.document.n_tokens), fidelity)


def within_bytes(attempt: Attempt, lowest: int, highest: int, limit: int, between: Between) -> Compressed:
    """The largest budget whose snapshot takes at most `limit` bytes.

    Raises:
        BudgetTooSmall: naming the bytes of the smallest snapshot there is.
    """
    codec = CODECS[attempt.how.codec]

    def fits(per_head: int) -> bool:
        between("search", 0, 1)
        return packed_bytes(attempt.cut(per_head), codec) <= limit

    if not fits(lowest):
        smallest = packed_bytes(attempt.cut(lowest), codec)
        raise BudgetTooSmall(
            f"max_bytes {limit} is too small: the tokens that are always kept take {smallest} bytes with the codec "
            f"{codec.name}: allow more, or use a smaller codec",
            n_bytes=smallest,
        )
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (middle, highest) if fits(middle) else (lowest, middle - 1)
    between("encode", 0, 1)
    return attempt.at(lowest)


def within_kl(attempt: Attempt, lowest: int, highest: int, limit: float, between: Between) -> Compressed:
    """The smallest budget found whose measured divergence stays within `limit`.

    Divergence need not fall evenly with the budget: what is returned was measured and is within the limit, but a
    smaller budget that happens to be as well can be missed. The search stops at 1 % of the context.

    Raises:
        BoundNotReached: if even the whole cache, through the codec, is further off.
    """
    between("search", 0, 1)
    best = attempt.at(highest)
    if best.fidelity.kl > limit:
        raise BoundNotReached(
            f"with everything kept, the codec {attempt.how.codec} alone diverges by {best.fidelity.kl:.2g} nats per "
            f"token, above max_kl {limit:g}: allow more, or use a finer codec",
            kl=best.fidelity.kl,
        )
    resolution = max(1, attempt.document.n_tokens // 100)
    while highest - lowest > resolution:
        between("search", 0, 1)
        middle = (lowest + highest) // 2
        found = attempt.at(middle)
        if found.fidelity.kl <= limit:
            best, highest = found, middle
        else:
            lowest = middle
    return best


def document_of(prompter: Prompter, part: ContextPart, probes: Sequence[str] = ()) -> Document:
    """A context's tokens with what the library must know of them.

    Args:
        prompter: of the model; says how a repetition is asked for.
        part: rendered and tokenized.
        probes: representative questions; raw text for a raw context.
    """
    first, (opening, closing) = prompter.repeat_parts(part.roles)
    asked = [
        prompter.query_part(part.roles, [Message("user", probe)]) if part.roles else prompter.raw(probe, begins=False)
        for probe in probes
    ]
    return Document(
        token_ids=torch.tensor(part.token_ids, dtype=torch.int64),
        body=part.body,
        protected=tuple(part.protected),
        repeat_first=tuple(first),
        repeat_next=(tuple(opening), tuple(closing)),
        probes=tuple(map(tuple, asked)),
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
