"""Top-k: each head keeps its best scores.

The selection of SnapKV (arXiv:2404.14469), SAGE-KV (arXiv:2503.08879) and KVzip (arXiv:2505.23416). As in the papers,
with ties broken by position.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.ranking import rank_per_head
from precis.scorers import Needs


@dataclass(frozen=True, slots=True)
class TopK:
    """Protected tokens, then the best scores."""

    wants_attention: bool = False
    nested: bool = True

    @property
    def needs(self) -> Needs:
        return frozenset()

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Keep each head's best entries.

        Args:
            prefill: not read.
            scores: [L, K, T] float32.
            budgets: [L, K] int64.
            protected: [T] bool.

        Returns:
            [L, K, T] bool.
        """
        free = budgets - protected.sum()
        return protected | (rank_per_head(scores, protected) < free[..., None])
