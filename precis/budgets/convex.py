"""AdaKV as in its paper: a mix of the budgets that follow the layer's best entries and of equal budgets.

Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
arXiv:2407.11550.
As in the paper, with exact totals: shares are rounded by largest remainder. Protected tokens stand outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.ranking import best_with_floor, shared_out
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Convex:
    """Adaptive budgets, mixed with equal ones.

    Attributes:
        floor_share: weight of the equal budgets, in [0, 1].
    """

    floor_share: float = 0.2
    needs_comparable: Comparable = "layer"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Hand out each layer's K * per_head entries.

        Args:
            prefill: not read.
            scores: [L, K, T] float32, comparable across the heads of a layer.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64, each layer summing to K * per_head.
        """
        n_protected = int(protected.sum())
        free = per_head - n_protected
        layers = []
        for layer in scores:
            total = free * layer.shape[0]
            adaptive = best_with_floor(layer, protected, total, 0).double()
            layers.append(shared_out((1 - self.floor_share) * adaptive + self.floor_share * free, total))
        return torch.stack(layers) + n_protected
