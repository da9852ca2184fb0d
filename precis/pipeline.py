"""The page to read first: a document becomes a small snapshot; a query is answered on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from precis.attempt import Attempt, Compressed, needs_of
from precis.core import Snapshot
from precis.engine import step
from precis.families import Model, Rotary
from precis.full_cache import Between, Document, silent
from precis.policies import POLICIES
from precis.prefill import prefill
from precis.protection import check_budget
from precis.sampling import Sampled, Sampler
from precis.searches import transformed, within_bytes, within_kl
from precis.selection import score
from precis.session import Feed, Session
from precis.text import ContextPart, Prompter
from precis.views import View
from precis.wire.messages import Message
from precis.wire.presets import Compression


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
        SnapshotStale: if the codec is `tc`, and the transform is not the one that `how` names.
    """
    per_head = check_budget(document.n_tokens, how, document.protected)
    full = prefill(model, rotary, document, needs_of(how), between)
    attempt = Attempt(model, rotary, document, how, key, full, score(full, POLICIES[how.policy]))
    if how.codec == "tc":
        return transformed(attempt, per_head, between)
    if not how.searches:
        between("encode", 0, 1)
        return attempt.at(per_head)
    lowest = next(n for n in range(1, per_head + 1) if n >= attempt.n_protected(n))
    if how.max_bytes is not None:
        return within_bytes(attempt, lowest, per_head, how.max_bytes, between)
    return within_kl(attempt, lowest, per_head, how.max_kl or 0.0, between)


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
