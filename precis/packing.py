"""The tables of a packed step, for all layers at once: what each row reads, and where new entries go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from precis.attention.ragged import ADDRESSES, COLUMNS, Table, addresses
from precis.core import Snapshot
from precis.session import Feed

_NAME = "addresses"  # among what is derived from a snapshot


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses are good while the feeds' snapshots and tails stay as they are.

    Attributes:
        runs: [L, runs, 8], see `attention.ragged`.
        places: [L, tokens, K, 3].
    """

    runs: Table
    places: Table


def plain(feeds: Sequence[Feed]) -> bool:
    """Whether every session reads all of its snapshot and forgets nothing of its answer."""
    sessions = [feed.session for feed in feeds]
    return all(session.view is None and session.trim is None and not session.seen for session in sessions)


def tables_of(feeds: Sequence[Feed]) -> Tables:
    """The tables of a step of plain sessions, whose tails have room.

    Neighbours on one snapshot read it as one run per head, so that its entries are fetched once for all of them.
    """
    g = feeds[0].session.snapshot.geometry
    starts = np.cumsum([0, *(len(feed.token_ids) for feed in feeds)]).tolist()
    n_tokens, group, heads = starts[-1], g.group_size, np.arange(g.n_kv_heads)
    groups = _groups(feeds)
    runs = np.empty((g.n_layers, len(groups) + len(feeds), g.n_kv_heads, COLUMNS), np.int64)
    places = np.empty((g.n_layers, n_tokens, g.n_kv_heads, 3), np.int64)
    for index, (first, stop) in enumerate(groups):
        runs[:, index, :, :ADDRESSES] = _entries_of(feeds[first].session.snapshot)
        runs[:, index, :, 5] = (heads * n_tokens + starts[first]) * group
        runs[:, index, :, 6:] = ((starts[stop] - starts[first]) * group, 0)
    for index, feed in enumerate(feeds):
        tail, start, stop = feed.session.tail, starts[index], starts[index + 1]
        room, size, n = tail.keys.shape[2], tail.keys.element_size() * g.head_dim, stop - start
        head = np.arange(g.n_layers * g.n_kv_heads).reshape(g.n_layers, g.n_kv_heads) * room
        own = runs[:, len(groups) + index]
        bases = [part.data_ptr() for part in (tail.keys, tail.values, tail.positions)]
        for column, (base, step) in enumerate(zip(bases, (size, size, 4), strict=True)):
            own[..., column] = base + head * step
            at = head[:, None] + tail.counts[:, None] + np.arange(n)[:, None]
            places[:, start:stop, :, column] = base + at * step
        own[..., 3] = 0
        own[..., 4] = tail.counts + n
        own[..., 5] = (heads * n_tokens + start) * group
        own[..., 6:] = (n * group, n > 1)
    return Tables(runs.reshape(g.n_layers, -1, COLUMNS), places)


def _groups(feeds: Sequence[Feed]) -> list[tuple[int, int]]:
    """Runs of neighbours on one snapshot."""
    edges = [0, *(i for i in range(1, len(feeds)) if feeds[i].session.snapshot is not feeds[i - 1].session.snapshot)]
    return list(zip(edges, [*edges[1:], len(feeds)], strict=True))


def _entries_of(snapshot: Snapshot) -> NDArray[np.int64]:
    """[L, K, 5] addresses and lengths of each head's entries, found once per snapshot."""
    g = snapshot.geometry
    if _NAME not in snapshot.indexes:
        found = [
            addresses(*snapshot.entries(layer, head)) for layer in range(g.n_layers) for head in range(g.n_kv_heads)
        ]
        snapshot.indexes[_NAME] = (torch.tensor(found, dtype=torch.int64),)
    table: NDArray[np.int64] = snapshot.indexes[_NAME][0].numpy()
    return table.reshape(g.n_layers, g.n_kv_heads, ADDRESSES)
