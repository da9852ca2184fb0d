"""Attention inside chunks of the document, without causality (Compactor)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.core import Geometry
from precis.observations import Reading


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """What the tokens of a chunk pay to one another, later ones included, summed over rows: [L, H, T] float32.

    Attributes:
        chunk: tokens; 0 at both ends of the context, outside of the chunks.
        n_first: first tokens, outside.
        n_last: last tokens, outside.
        scaled: multiply logits with the model's scaling; kvpress leaves it out.
    """

    chunk: int = 256
    n_first: int = 8
    n_last: int = 4
    scaled: bool = True

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self, geometry, n_tokens)


@dataclass(slots=True)
class _Observer:
    what: LocalAttention
    geometry: Geometry
    n_tokens: int
    open: dict[int, Tensor] = field(default_factory=dict)  # queries [H, n, D] of the chunk that is not complete yet
    sums: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        stop = keys.shape[1]
        if layer not in self.sums:
            self.sums[layer] = torch.zeros(self.geometry.n_heads, self.n_tokens, device=query.device)
            self.open[layer] = query[:, :0]
        queries = torch.cat([self.open[layer], query], 1)
        first = stop - queries.shape[1]
        end = self.n_tokens - self.what.n_last
        at = max(first, self.what.n_first)
        while at < end:
            last = min(at + self.what.chunk, end)
            if last > stop:
                break
            self._add(layer, queries[:, at - first : last - first], keys[:, at:last], at)
            at = last
        self.open[layer] = queries[:, at - first :].clone()

    def _add(self, layer: int, queries: Tensor, keys: Tensor, at: int) -> None:
        g = self.geometry
        rows = queries.float().reshape(g.n_kv_heads, -1, g.head_dim)
        logits = rows @ keys.float().transpose(1, 2) * (g.scaling[layer] if self.what.scaled else 1.0)
        paid = torch.softmax(logits, -1).reshape(g.n_heads, -1, keys.shape[1]).sum(1)
        self.sums[layer][:, at : at + keys.shape[1]] = paid

    def finish(self, reading: Reading) -> Tensor:
        return torch.stack([found for _, found in sorted(self.sums.items())])
