"""A query's private tail: the entries of its question and its answer, on top of a shared snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precis.core import Geometry

_ROOM = 256  # entries of room in a new tail; doubled when full


@dataclass(slots=True)
class Tail:
    """Entries per layer and kv head, of which a trim may drop some.

    Attributes:
        keys, values: [L, K, room, D].
        positions: [L, K, room] int32.
        counts: [L, K] entries that are filled.
        n_tokens: tokens that went in.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    counts: NDArray[np.int64]
    n_tokens: int = 0

    @staticmethod
    def empty(geometry: Geometry, like: Tensor) -> Tail:
        """Nothing yet, in the dtype and on the device of `like`."""
        g = geometry
        keys = like.new_empty(g.n_layers, g.n_kv_heads, _ROOM, g.head_dim)
        positions = torch.zeros(keys.shape[:3], dtype=torch.int32, device=like.device)
        return Tail(keys, torch.empty_like(keys), positions, np.zeros(keys.shape[:2], np.int64))

    def copy(self) -> Tail:
        """The same entries, to go on with in another way."""
        return Tail(self.keys.clone(), self.values.clone(), self.positions.clone(), self.counts.copy(), self.n_tokens)

    def make_room(self, n_tokens: int) -> None:
        """Let every head take `n_tokens` more."""
        room, filled = self.keys.shape[2], int(self.counts.max())
        if filled + n_tokens > room:
            more = max(room, filled + n_tokens - room)
            pad = self.keys.new_empty(*self.keys.shape[:2], more, self.keys.shape[3])
            self.keys = torch.cat([self.keys, pad], 2)
            self.values = torch.cat([self.values, torch.empty_like(pad)], 2)
            self.positions = torch.nn.functional.pad(self.positions, (0, more))

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Take keys and values [K, n, D] of the next tokens, at `positions` [n]."""
        n = key.shape[1]
        for heads, start in _runs(self.counts[layer].tolist()):
            self.keys[layer, heads, start : start + n] = key[heads]
            self.values[layer, heads, start : start + n] = value[heads]
            self.positions[layer, heads, start : start + n] = positions.to(torch.int32)
        self.counts[layer] += n

    def entries(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [n, D], values [n, D] and positions [n] of one head, ascending by position."""
        n = int(self.counts[layer, kv_head])
        return self.keys[layer, kv_head, :n], self.values[layer, kv_head, :n], self.positions[layer, kv_head, :n]

    def keep(self, layer: int, kv_head: int, kept: Tensor) -> None:
        """Drop all but some entries of one head; kept: [n] bool."""
        n = int(kept.sum())
        for entries in (self.keys, self.values, self.positions):
            entries[layer, kv_head, :n] = entries[layer, kv_head, : kept.shape[0]][kept]
        self.counts[layer, kv_head] = n


@dataclass(slots=True)
class Watched:
    """What a trim must know of an answer.

    Attributes:
        n_asked: tokens of the question.
        rows: [L, H, W, D] the last queries, in a ring.
        positions: [W] of their tokens, -1 where there is none yet.
        memory: per layer and kv head, of the last look, for the entries that were left.
        n_seen: tokens of the answer.
        looked_at: how many there were at the last look.
    """

    rows: Tensor
    positions: Tensor
    n_asked: int = 0
    n_seen: int = 0
    looked_at: int = 0
    memory: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def empty(geometry: Geometry, n_window: int, like: Tensor) -> Watched:
        """Nothing seen yet."""
        rows = like.new_zeros(geometry.n_layers, geometry.n_heads, n_window, geometry.head_dim)
        return Watched(rows, torch.full((n_window,), -1, device=like.device))


def _runs(counts: list[int]) -> list[tuple[slice, int]]:
    """Neighbouring heads with equal counts."""
    runs: list[tuple[slice, int]] = []
    for head, count in enumerate(counts):
        if runs and runs[-1][1] == count:
            runs[-1] = (slice(runs[-1][0].start, head + 1), count)
        else:
            runs.append((slice(head, head + 1), count))
    return runs
