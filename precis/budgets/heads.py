"""Two-level heads: some heads keep everything, the others only what is protected.

The head-level mode of KVzip (Kim et al. 2025, arXiv:2505.23416), and the deployment of DuoAttention (Xiao et al. 2024,
arXiv:2410.10819) and PruLong (Bhaskar et al. 2025, arXiv:2506.17121) where a table gives the importance of heads.
Differs from the papers: without a table a head's importance is its highest score in this very context (KVzip takes it
from one sample), and the head on the border gets what is left of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """Full budgets for the most important heads, protected tokens only for the rest.

    Attributes:
        by_table: whether importance is the model's table `importance` [L, K], instead of the head's highest score.
    """

    by_table: bool = False
    needs_comparable: Comparable = "global"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Fill heads up from the most important on.

        Args:
            prefill: with the table, if it decides.
            scores: [L, K, T] float32.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_protected = int(protected.sum())
        importance = scores.masked_fill(protected, float("-inf")).amax(-1)
        if self.by_table:
            importance = prefill.table("importance").to(scores.device)
        order = torch.sort(importance.flatten(), descending=True, stable=True).indices
        room = n_tokens - n_protected
        left = (per_head - n_protected) * order.shape[0] - room * torch.arange(order.shape[0], device=order.device)
        budgets = torch.empty_like(order)
        budgets[order] = left.clamp(0, room) + n_protected
        return budgets.reshape(n_layers, n_kv_heads)
