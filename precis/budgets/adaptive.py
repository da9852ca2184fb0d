"""AdaKV: inside a layer, heads whose attention is spread out get more.

Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
arXiv:2407.11550.
Differs from the paper: each head is sure of its own best `safeguard` share and the rest goes to the layer's best
entries, as in kvpress; the paper mixes both budgets convexly. Protected tokens stand outside of the competition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.ranking import best_with_floor
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Budgets that follow the scores inside a layer.

    Attributes:
        safeguard: share of the mean budget that every head is sure of, in [0, 1].
    """

    safeguard: float = 0.2
    needs_comparable: Comparable = "layer"

    @property
    def nested(self) -> Comparable | None:
        return "layer" if self.safeguard == 0 else None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Hand out each layer's K * per_head entries to its best scores.

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
        floor = int(self.safeguard * free)
        layers = [best_with_floor(layer, protected, free * layer.shape[0], floor) for layer in scores]
        return torch.stack(layers) + n_protected
