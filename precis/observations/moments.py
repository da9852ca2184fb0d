"""Mean and covariance of the queries that a document's future readers are expected to ask with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.core import Geometry
from precis.families import Rotary
from precis.observations import Reading


@dataclass(frozen=True, slots=True)
class QueryMoments:
    """Mean and covariance of the queries before RoPE, turned to the average future position: [L, H, 1 + D, D] float32.

    Row 0 is the mean, the rest the covariance, so that a future query q is about N(mean, covariance).

    Attributes:
        n_sink: first tokens, left out.
        n_future: positions after the context over which the rotation is averaged.
    """

    n_sink: int = 4
    n_future: int = 512

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self)


@dataclass(slots=True)
class _Observer:
    what: QueryMoments
    rotated: dict[int, list[Tensor]] = field(default_factory=dict)

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        self.rotated.setdefault(layer, []).append(query)

    def finish(self, reading: Reading) -> Tensor:
        found = []
        for layer in sorted(self.rotated):
            queries = torch.cat(self.rotated.pop(layer), 1)
            found.append(self._moments(layer, queries, reading.rotary))
        return torch.stack(found)

    def _moments(self, layer: int, queries: Tensor, rotary: Rotary) -> Tensor:
        n_heads, n_tokens, dim = queries.shape
        positions = torch.arange(n_tokens, device=queries.device)
        before = rotary.undo(layer, queries.reshape(-1, dim), positions.repeat(n_heads)).view(queries.shape)
        before = before[:, min(self.what.n_sink, n_tokens - 1) :]
        mean = before.mean(1, keepdim=True)
        centred = before - mean
        covariance = centred.transpose(1, 2) @ centred / before.shape[1]
        turn = self._average_turn(layer, n_tokens, dim, rotary, queries.device)
        return torch.cat([mean @ turn, turn.T @ covariance @ turn], 1)

    def _average_turn(self, layer: int, n_tokens: int, dim: int, rotary: Rotary, device: torch.device) -> Tensor:
        """[D, D]: x @ turn is x rotated to the average of the future positions."""
        last = max(n_tokens + 1, min(n_tokens + self.what.n_future, rotary.n_positions))
        future = torch.arange(n_tokens, last, device=device).clamp_max(rotary.n_positions - 1)
        units = torch.eye(dim, device=device).repeat(len(future), 1)
        turned = rotary.redo(layer, units, future.repeat_interleave(dim))
        return turned.view(len(future), dim, dim).mean(0)
