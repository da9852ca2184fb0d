"""The queries of the last tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.core import Geometry
from precis.observations import Reading


@dataclass(frozen=True, slots=True)
class WindowQueries:
    """Queries after RoPE of the last `n_window` tokens: [L, H, W, D] in the model's dtype, W <= n_window.

    Attributes:
        n_window: tokens.
    """

    n_window: int

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self.n_window)


@dataclass(slots=True)
class _Observer:
    n_window: int
    queries: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        earlier = self.queries.get(layer, query[:, :0])
        self.queries[layer] = torch.cat([earlier, query], 1)[:, -self.n_window :].clone()

    def finish(self, reading: Reading) -> Tensor:
        return torch.stack([queries for _, queries in sorted(self.queries.items())])
