"""Global: one threshold over all layers and heads.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", arXiv:2505.23416.
As in the paper, but with exact totals under ties; protected tokens stand outside of the competition.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.ranking import best_with_floor
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Global:
    """Budgets that follow the scores over the whole model.

    Attributes:
        safeguard: share of the mean budget that every head is sure of, in [0, 1].
    """

    safeguard: float = 0.0
    needs_comparable: Comparable = "global"

    @property
    def nested(self) -> Comparable | None:
        return "global" if self.safeguard == 0 else None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Hand out all L * K * per_head entries to the best scores.

        Args:
            prefill: not read.
            scores: [L, K, T] float32, comparable across layers and heads.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_protected = int(protected.sum())
        free = per_head - n_protected
        flat = scores.reshape(n_layers * n_kv_heads, n_tokens)
        counts = best_with_floor(flat, protected, free * flat.shape[0], int(self.safeguard * free))
        return counts.reshape(n_layers, n_kv_heads) + n_protected
