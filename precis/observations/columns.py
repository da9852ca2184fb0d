"""What every token of the document together paid to each entry (H2O's accumulated attention)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.attention.dense import attention_weights
from precis.core import Geometry
from precis.observations import Reading

_ROWS = 128


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """Causal attention summed over all rows: [L, H, T] float32, divided by the rows that can see the entry if `mean`.

    Doubles the attention part of a prefill, since the weights are computed once more, a block of rows at a time.
    """

    mean: bool = False

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(geometry, n_tokens, self.mean)


@dataclass(slots=True)
class _Observer:
    geometry: Geometry
    n_tokens: int
    mean: bool
    sums: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, query: Tensor, keys: Tensor, start: int) -> None:
        g, stop = self.geometry, keys.shape[1]
        if layer not in self.sums:
            self.sums[layer] = torch.zeros(g.n_heads, self.n_tokens, device=query.device)
        columns = torch.arange(stop, device=query.device)[None]
        for row in range(start, stop, _ROWS):
            last = min(stop, row + _ROWS)
            weights = attention_weights(
                query[:, row - start : last - start],
                keys[:, :last],
                columns[:, row:last].T,
                columns[:, :last],
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
                window=g.windows[layer],
            )
            self.sums[layer][:, :last] += weights.sum(2).flatten(0, 1)

    def finish(self, reading: Reading) -> Tensor:
        sums = torch.stack([found for _, found in sorted(self.sums.items())])
        if not self.mean:
            return sums
        return sums / torch.arange(self.n_tokens, 0, -1, device=sums.device)
