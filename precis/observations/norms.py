"""How much each value would write into the residual stream: ||v W_o|| (arXiv:2502.03805)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precis.core import Geometry
from precis.families import output_projection
from precis.observations import Afterwards, Reading

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class OutputNorms:
    """||v W_o|| of every value for every query head of its group: [L, H, T] float32.

    Attributes:
        order: 1 as in CriticalKV, or 2, which costs D / hidden of it by way of the Gram matrix W_o W_o^T.
    """

    order: Literal[1, 2] = 1

    def start(self, geometry: Geometry, n_tokens: int) -> _Observer:
        """Begin."""
        return _Observer(self.order)


@dataclass(slots=True)
class _Observer(Afterwards):
    order: int

    def finish(self, reading: Reading) -> Tensor:
        full, g = reading.full, reading.full.geometry
        norms = torch.empty(g.n_layers, g.n_heads, full.n_tokens, device=full.keys.device)
        for layer, attention in enumerate(reading.model.attentions):
            weight = output_projection(attention).weight.T.reshape(g.n_heads, g.head_dim, -1)  # type: ignore[union-attr]
            for head in range(g.n_heads):
                values = full.values[layer, head // g.group_size]
                norms[layer, head] = _first(values, weight[head]) if self.order == 1 else _second(values, weight[head])
        return norms


def _first(values: Tensor, weight: Tensor) -> Tensor:
    """||v W||_1 of values [T, D] under weight [D, hidden], a block at a time."""
    blocks = [
        torch.linalg.vector_norm(part @ weight, 1, -1, dtype=torch.float32) for part in torch.split(values, _BLOCK)
    ]
    return torch.cat(blocks)


def _second(values: Tensor, weight: Tensor) -> Tensor:
    """||v W||_2 = sqrt(v W W^T v^T)."""
    values, weight = values.float(), weight.float()
    return ((values @ (weight @ weight.T)) * values).sum(-1).clamp_min(0).sqrt()
