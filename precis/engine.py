"""Continuous batching over shared snapshots: one packed forward per step, one private tail per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.attention.torch_ref import Segment, attend
from precis.core import Entries, Snapshot
from precis.families import Model
from precis.views import View

_TAIL = 256  # entries of room in a new tail; doubled when full


@dataclass(slots=True)
class Session:
    """One query's private tail on top of a shared, read-only snapshot.

    Attributes:
        keys, values: [L, K, room, D], of which the first `n_tail` tokens are filled.
        view: which entries are read after the query, or None for all.
        asked: whether the query is complete.
        seen: per (layer, kv head), what the view chose.
    """

    snapshot: Snapshot
    keys: Tensor
    values: Tensor
    view: View | None = None
    n_tail: int = 0
    asked: bool = False
    seen: dict[tuple[int, int], Entries] = field(default_factory=dict)

    @staticmethod
    def on(snapshot: Snapshot, view: View | None = None) -> Session:
        """A new, empty tail."""
        g = snapshot.geometry
        keys = snapshot.keys.new_empty(g.n_layers, g.n_kv_heads, _TAIL, g.head_dim)
        return Session(snapshot, keys, torch.empty_like(keys), view)

    @property
    def position(self) -> int:
        """Of the next token: counted from the original length, however few entries the snapshot keeps."""
        return self.snapshot.header.next_position + self.n_tail

    def make_room(self, n_tokens: int) -> None:
        """Let the tail take `n_tokens` more."""
        room = self.keys.shape[2]
        if self.n_tail + n_tokens > room:
            more = max(room, self.n_tail + n_tokens - room)
            pad = self.keys.new_empty(*self.keys.shape[:2], more, self.keys.shape[3])
            self.keys = torch.cat([self.keys, pad], 2)
            self.values = torch.cat([self.values, torch.empty_like(pad)], 2)


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens of one session in a step.

    Attributes:
        last: whether these end the query, so that a view is chosen now.
        all_logits: logits after every token, not only after the last.
    """

    session: Session
    token_ids: Sequence[int]
    last: bool = False
    all_logits: bool = False


class PackedStep:
    """What one packed forward attends to: each query row its snapshot and its own tail."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self._feeds = feeds
        self._starts = [0]
        for feed in feeds:
            feed.session.make_room(len(feed.token_ids))
            self._starts.append(self._starts[-1] + len(feed.token_ids))
        spans = [(f.session.position, f.session.position + len(f.token_ids)) for f in feeds]
        self.positions = torch.cat([torch.arange(a, b, device=device) for a, b in spans])
        self._tails = [torch.arange(f.session.snapshot.header.next_position, b, device=device, dtype=torch.int32)
                       for f, (_, b) in zip(feeds, spans, strict=True)]  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v to the tails; attend rows [K][token][G] over snapshots and tails."""
        g = self._feeds[0].session.snapshot.geometry
        n_tokens, group = query.shape[1], g.group_size
        rows = query.reshape(g.n_kv_heads, group, n_tokens, g.head_dim).transpose(1, 2)
        segments = []
        self._look_again(layer, rows)
        for kv_head in range(g.n_kv_heads):
            segments += self._shared(layer, kv_head, n_tokens * group * kv_head, group)
        for index, feed in enumerate(self._feeds):
            start, stop = self._starts[index], self._starts[index + 1]
            self._append(layer, feed, key[:, start:stop], value[:, start:stop])
            segments += self._private(layer, index, n_tokens, group)
            if feed.last and feed.session.view is not None and not feed.session.view.every_step:
                self._choose(layer, feed.session, rows[:, stop - 1])
        out = attend(
            rows.reshape(-1, g.head_dim),
            self.positions.repeat_interleave(group).repeat(g.n_kv_heads),
            segments,
            scaling=g.scaling[layer],
            softcap=g.softcap[layer],
            window=g.windows[layer],
            sinks=None if sinks is None else sinks.reshape(g.n_kv_heads, 1, group).expand(-1, n_tokens, -1).reshape(-1),
        )
        return out.reshape(g.n_kv_heads, n_tokens, group, -1).transpose(1, 2).reshape(query.shape)

    def _shared(self, layer: int, kv_head: int, first_row: int, group: int) -> list[Segment]:
        """One segment per run of neighbouring sessions on one snapshot, so that it is read once for all of them."""
        segments: list[Segment] = []
        at = 0
        while at < len(self._feeds):
            session, stop = self._feeds[at].session, at + 1
            seen = session.seen.get((layer, kv_head))
            while seen is None and stop < len(self._feeds) and self._joins(session, stop, layer, kv_head):
                stop += 1
            if seen is None:
                seen = session.snapshot.entries(layer, kv_head)
            span = (first_row + self._starts[at] * group, first_row + self._starts[stop] * group)
            keys, values, positions, bias = seen
            segments.append(Segment(keys, values, positions, rows=span, causal=False, bias=bias))
            at = stop
        return segments

    def _joins(self, session: Session, index: int, layer: int, kv_head: int) -> bool:
        other = self._feeds[index].session
        return other.snapshot is session.snapshot and (layer, kv_head) not in other.seen

    def _private(self, layer: int, index: int, n_tokens: int, group: int) -> list[Segment]:
        session, positions = self._feeds[index].session, self._tails[index]
        n, causal = positions.shape[0], self._starts[index + 1] - self._starts[index] > 1
        return [
            Segment(
                session.keys[layer, kv_head, :n],
                session.values[layer, kv_head, :n],
                positions,
                rows=(
                    (kv_head * n_tokens + self._starts[index]) * group,
                    (kv_head * n_tokens + self._starts[index + 1]) * group,
                ),
                causal=causal,
            )
            for kv_head in range(session.keys.shape[1])
        ]

    @staticmethod
    def _append(layer: int, feed: Feed, key: Tensor, value: Tensor) -> None:
        session, stop = feed.session, feed.session.n_tail + len(feed.token_ids)
        session.keys[layer, :, session.n_tail : stop] = key
        session.values[layer, :, session.n_tail : stop] = value

    def _look_again(self, layer: int, rows: Tensor) -> None:
        """Choose anew for answers whose view changes with every token. Several tokens at once read everything."""
        for index, feed in enumerate(self._feeds):
            session, start = feed.session, self._starts[index]
            if session.view is None or not session.view.every_step or not session.asked:
                continue
            if self._starts[index + 1] - start == 1:
                self._choose(layer, session, rows[:, start])
            else:
                for kv_head in range(rows.shape[0]):
                    session.seen.pop((layer, kv_head), None)

    @staticmethod
    def _choose(layer: int, session: Session, queries: Tensor) -> None:
        """queries [K, G, D] of one token."""
        snapshot, view = session.snapshot, session.view
        if view is None or layer < view.dense_layers:
            return
        for kv_head in range(queries.shape[0]):
            keys, values, positions, bias = snapshot.entries(layer, kv_head)
            name = (type(view), view.index_size, layer, kv_head)
            if name not in snapshot.indexes:
                snapshot.indexes[name] = view.prepare(keys, positions)
            chosen = view.select(queries[kv_head], keys, positions, snapshot.indexes[name])
            session.seen[layer, kv_head] = (
                keys[chosen],
                values[chosen],
                positions[chosen],
                None if bias is None else bias[chosen],
            )


@torch.inference_mode()
def step(model: Model, feeds: Sequence[Feed]) -> list[Tensor]:
    """One packed forward.

    Args:
        model: from `attention.plug.attach`.
        feeds: at least one; sessions on the same snapshot should stand together, so that it is read once.

    Returns:
        Per feed, float32 logits [1, vocabulary] after its last token, or [n, vocabulary] after each.
    """
    packed = PackedStep(feeds, model.device)
    wanted: list[int] = []
    sizes = []
    for feed, start in zip(feeds, packed._starts, strict=False):
        n = len(feed.token_ids)
        rows = range(start, start + n) if feed.all_logits else [start + n - 1]
        wanted += rows
        sizes.append(len(rows))
    token_ids = torch.tensor([t for feed in feeds for t in feed.token_ids], device=model.device)
    out = model.hf(
        input_ids=token_ids[None],
        position_ids=packed.positions[None],
        use_cache=False,
        kv_store=packed,
        logits_to_keep=torch.tensor(wanted, device=model.device),
    )
    for feed in feeds:
        feed.session.n_tail += len(feed.token_ids)
        feed.session.asked |= feed.last
    return list(out.logits[0].float().split(sizes))
