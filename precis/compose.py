"""Several snapshots as one, so that a question can be asked of several documents at once.

No paper. Like EPIC (arXiv 2410.15332), and CacheBlend (arXiv 2405.16444) before it, documents that were read apart are
put together without being read again, but for the first tokens of each, whose entries serve as attention sinks when a
document is read alone and must not when it follows another. All other keys are turned to the positions behind the
documents before. What one document says of another was never read: docs/methods.md has what that costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Entries, Snapshot, SnapshotHeader
from precis.engine import step
from precis.errors import ContextTooLong, UnsupportedModel
from precis.families import Model, Rotary
from precis.fingerprint import digest
from precis.session import Feed, Session

N_AGAIN = 16  # first tokens of each document but the first that are read again behind those before it


@dataclass(frozen=True, slots=True)
class Part:
    """A document to be put together with others.

    Attributes:
        snapshot: of it.
        token_ids: of it, so that some can be read again.
    """

    snapshot: Snapshot
    token_ids: Sequence[int]


def compose(model: Model, rotary: Rotary, parts: Sequence[Part], n_again: int = N_AGAIN) -> Snapshot:
    """One snapshot of several documents, in their order.

    Args:
        model: that made them.
        rotary: of the model.
        parts: at least one; together within the model's length.
        n_again: tokens of each part but the first that are read again.

    Raises:
        ContextTooLong: if they are too long together.
        UnsupportedModel: if the model's RoPE cannot be reached.
    """
    if sum(part.snapshot.header.next_position for part in parts) > model.geometry.max_length:
        raise ContextTooLong("the documents are longer together than the model reads")
    if len(parts) > 1 and not rotary.reached:
        raise UnsupportedModel("keys of this model cannot be turned to other positions")
    whole = parts[0].snapshot
    for part in parts[1:]:
        whole = _joined(rotary, whole, part.snapshot, _read_again(model, whole, part, n_again), n_again)
    return whole


def fingerprint_of(parts: Sequence[str]) -> str:
    """Fingerprint of two documents put together, by theirs."""
    return digest(**{f"part{index}": part for index, part in enumerate(parts)})


def _read_again(model: Model, before: Snapshot, part: Part, n_again: int) -> Session | None:
    """The first tokens of a document, read behind what is before it."""
    tokens = list(part.token_ids[:n_again])
    if not tokens:
        return None
    session = Session.on(before)
    step(model, [Feed(session, tokens)])
    return session


def _joined(rotary: Rotary, before: Snapshot, after: Snapshot, again: Session | None, n_again: int) -> Snapshot:
    """Two snapshots as one."""
    start = before.header.next_position
    g, pieces, counts = before.geometry, list[Entries](), []
    biased = before.bias is not None or after.bias is not None
    for layer in range(g.n_layers):
        for head in range(g.n_kv_heads):
            found = [before.entries(layer, head)]
            if again is not None:
                found.append((*again.tail.entries(layer, head), None))
            found.append(_moved(rotary, layer, after.entries(layer, head), start, n_again))
            counts.append(sum(entries[0].shape[0] for entries in found))
            pieces.append(_cat(found, biased))
    keys, values, positions, bias = _cat(pieces, biased)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(torch.tensor(counts), 0)])
    one, two = before.header, after.header
    header = SnapshotHeader(
        fingerprint_of([one.fingerprint, two.fingerprint]),
        one.n_tokens + two.n_tokens,
        start + two.next_position,
        one.n_sink,
        one.policy,
    )
    return Snapshot(g, header, keys, values, positions, offsets, bias=bias)


def _moved(rotary: Rotary, layer: int, entries: Entries, start: int, n_again: int) -> Entries:
    """A head's entries from position `n_again` on, turned to positions from `start` on."""
    keys, values, positions, bias = entries
    if n_again:
        kept = positions >= n_again
        keys, values, positions = keys[kept], values[kept], positions[kept]
        bias = None if bias is None else bias[kept]
    plain = rotary.undo(layer, keys, positions)
    positions = positions + start
    return rotary.redo(layer, plain, positions).to(keys.dtype), values, positions, bias


def _cat(pieces: Sequence[Entries], biased: bool) -> Entries:
    keys, values, positions = (torch.cat([piece[i] for piece in pieces]) for i in range(3))  # type: ignore[misc]
    bias: Tensor | None = None
    if biased:
        none = [piece[0].new_zeros(len(piece[0]), dtype=torch.float32) for piece in pieces]
        bias = torch.cat([each if piece[3] is None else piece[3] for piece, each in zip(pieces, none, strict=True)])
    return keys, values, positions, bias
