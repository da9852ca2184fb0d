"""Continuous batching over shared snapshots: one packed forward per step, one private tail per query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from precis.attention import ragged, triton_runs
from precis.attention.torch_ref import Segment, attend
from precis.core import Entries, Snapshot, SnapshotHeader
from precis.families import Model
from precis.packing import plain, tables_of
from precis.session import Feed, Session
from precis.trimming import look, remember


class Logits(TypedDict):
    """How a layer makes logits, and which of them a row does not see."""

    scaling: float
    softcap: float | None
    window: int | None


class PackedStep:
    """What one packed forward attends to: each query row its snapshot and its own tail."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self._feeds = feeds
        self._starts = [0]
        for feed in feeds:
            feed.session.tail.make_room(len(feed.token_ids))
            self._starts.append(self._starts[-1] + len(feed.token_ids))
        spans = [(f.session.position, f.session.position + len(f.token_ids)) for f in feeds]
        self.positions = torch.cat([torch.arange(a, b, dtype=torch.int32, device=device) for a, b in spans])
        self._like = feeds[0].session.tail.keys
        self._native, self._triton = ragged.usable(self._like), triton_runs.usable(self._like)
        self.tables = tables_of(feeds) if (self._native or self._triton) and plain(feeds) else None
        self._units: list[triton_runs.Units] = []
        if self._triton and self.tables is not None:
            self._units = self._cut(self.tables.runs, self.tables.places)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Append k and v to the tails; attend rows [K][token][G] over snapshots and tails."""
        g = self._feeds[0].session.snapshot.geometry
        how: Logits = {"scaling": g.scaling[layer], "softcap": g.softcap[layer], "window": g.windows[layer]}
        if self._native or self._triton:
            query, key, value = (part.to(self._like.dtype).contiguous() for part in (query, key, value))
        if self._units:
            new = ragged.New(query, key, value, self.positions)
            return triton_runs.attend(new, self._units[layer], sinks=sinks, **how)
        if self.tables is not None:
            new = ragged.New(query, key, value, self.positions, self.tables.places[layer])
            return ragged.attend(new, self.tables.runs[layer], sinks=sinks, **how)
        rows = query.reshape(g.n_kv_heads, g.group_size, -1, g.head_dim).transpose(1, 2)
        segments = self._segments(layer, rows, key, value)
        new = ragged.New(query, key, value, self.positions)
        if self._native:
            out = ragged.attend(new, ragged.runs_of(segments), sinks=sinks, **how)
        elif self._triton:
            out = triton_runs.attend(new, self._cut([ragged.runs_of(segments)])[0], sinks=sinks, **how)
        else:
            out = self._by_torch(rows, segments, how, sinks).transpose(1, 2).reshape(query.shape)
        self._trim(layer, query, sinks)
        return out

    def _cut(
        self, layers: Sequence[ragged.Table] | ragged.Table, places: ragged.Table | None = None
    ) -> list[triton_runs.Units]:
        n_kv_heads, entry_bytes = self._like.shape[1], self._like.shape[3] * self._like.element_size()
        rows_per_head = self._starts[-1] * self._feeds[0].session.snapshot.geometry.group_size
        return triton_runs.units_of(layers, rows_per_head, n_kv_heads, entry_bytes, self._like.device, places)

    def done(self) -> None:
        """Count what the step took in, once all layers have it."""
        for feed in self._feeds:
            if self.tables is not None:
                feed.session.tail.counts += len(feed.token_ids)
            feed.session.fed(len(feed.token_ids), last=feed.last)

    def _segments(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> list[Segment]:
        """What rows [K, n, G, D] read, once the new entries are in their tails and views have chosen."""
        n_kv_heads, n_tokens, group, _ = rows.shape
        segments = []
        self._look_again(layer, rows)
        for kv_head in range(n_kv_heads):
            segments += self._shared(layer, kv_head, n_tokens * group * kv_head, group)
        for index, feed in enumerate(self._feeds):
            start, stop = self._starts[index], self._starts[index + 1]
            span = slice(start, stop)
            feed.session.tail.append(layer, key[:, span], value[:, span], self.positions[span])
            segments += self._private(layer, index, n_tokens, group)
            if feed.last and feed.session.view is not None and not feed.session.view.every_step:
                self._choose(layer, feed.session, rows[:, stop - 1])
        return segments

    def _by_torch(self, rows: Tensor, segments: Sequence[Segment], how: Logits, sinks: Tensor | None) -> Tensor:
        n_kv_heads, n_tokens, group, head_dim = rows.shape
        positions = self.positions.repeat_interleave(group).repeat(n_kv_heads)
        logits = None if sinks is None else sinks.reshape(n_kv_heads, 1, group).expand(-1, n_tokens, -1).reshape(-1)
        return attend(rows.reshape(-1, head_dim), positions, segments, sinks=logits, **how).reshape(rows.shape)

    def _trim(self, layer: int, query: Tensor, sinks: Tensor | None) -> None:
        """Let answers forget, after this layer has read them."""
        for feed, start, stop in zip(self._feeds, self._starts, self._starts[1:], strict=False):
            session = feed.session
            if session.trim is not None and session.asked:
                remember(session, layer, query[:, start:stop], self.positions[start:stop])
                if session.looks_now:
                    look(session, layer, sinks)

    def _shared(self, layer: int, kv_head: int, first_row: int, group: int) -> list[Segment]:
        """One segment per run of neighbouring sessions on one snapshot, so that it is read once for all of them."""
        segments: list[Segment] = []
        at = 0
        while at < len(self._feeds):
            session, stop = self._feeds[at].session, at + 1
            seen = session.seen.get((layer, kv_head))
            while seen is None and stop < len(self._feeds) and self._joins(session, stop, layer, kv_head):
                stop += 1
            rows = (first_row + self._starts[at] * group, first_row + self._starts[stop] * group)
            whole = session.snapshot.entries(layer, kv_head)
            for keys, values, positions, bias in [whole] if seen is None else _slid(session, seen, whole):
                segments.append(Segment(keys, values, positions, rows=rows, causal=False, bias=bias))
            at = stop
        return segments

    def _joins(self, session: Session, index: int, layer: int, kv_head: int) -> bool:
        other = self._feeds[index].session
        return other.snapshot is session.snapshot and (layer, kv_head) not in other.seen

    def _private(self, layer: int, index: int, n_tokens: int, group: int) -> list[Segment]:
        tail, start, stop = self._feeds[index].session.tail, self._starts[index], self._starts[index + 1]
        return [
            Segment(
                *tail.entries(layer, kv_head),
                rows=((kv_head * n_tokens + start) * group, (kv_head * n_tokens + stop) * group),
                causal=stop - start > 1,
            )
            for kv_head in range(tail.keys.shape[1])
        ]

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
            entries = keys, _, positions, _ = snapshot.entries(layer, kv_head)
            name = (type(view), view.index_size, layer, kv_head)
            if name not in snapshot.indexes:
                snapshot.indexes[name] = view.prepare(keys, positions)
            chosen = view.select(queries[kv_head], keys, positions, snapshot.indexes[name])
            session.seen[layer, kv_head] = _part(entries, chosen)


def _slid(session: Session, seen: Entries, whole: Entries) -> list[Entries]:
    """What is left of a view whose most recent entries make room for the answer's, one by one."""
    n_sliding = session.view.n_sliding if session.view is not None else 0
    if not n_sliding or session.watched is None or not session.asked or seen[0].shape[0] == whole[0].shape[0]:
        return [seen]
    fixed = seen[0].shape[0] - n_sliding
    gone = min(n_sliding, session.watched.n_seen + 1)
    return [_part(seen, slice(fixed)), _part(seen, slice(fixed + gone, None))]


def _part(entries: Entries, which: slice | Tensor) -> Entries:
    keys, values, positions, bias = entries
    return keys[which], values[which], positions[which], None if bias is None else bias[which]


def nothing_read(model: Model) -> Snapshot:
    """The snapshot of no document, for questions that stand alone."""
    g = model.geometry
    entries = torch.empty(0, g.head_dim, dtype=model.dtype, device=model.device)
    positions = torch.empty(0, dtype=torch.int32, device=model.device)
    offsets = torch.zeros(g.n_layers * g.n_kv_heads + 1, dtype=torch.int64)
    return Snapshot(g, SnapshotHeader("", 0, 0, 0, {}), entries, entries, positions, offsets)


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
    token_ids = [token for feed in feeds for token in feed.token_ids]
    if model.native is not None and packed.tables is not None and len(token_ids) <= model.native.max_tokens:
        logits: Tensor = model.native.step(token_ids, packed.positions, packed.tables, wanted)
    else:
        logits = model.hf(
            input_ids=torch.tensor(token_ids, device=model.device)[None],
            position_ids=packed.positions[None].long(),
            use_cache=False,
            kv_store=packed,
            logits_to_keep=torch.tensor(wanted, device=model.device),
        ).logits[0]
    packed.done()
    return list(torch.split(logits.float(), sizes))
