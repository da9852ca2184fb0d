"""Threshold: keep what scores enough; the budget is an output.

The rule of CORM (Dai et al. 2024, arXiv:2404.15949), with scores in units of the threshold. Differs from the paper: a
budget can be given as a ceiling, and then the best scores of the whole model are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.ranking import counts_of_best
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Threshold:
    """As many entries as reach a score.

    Attributes:
        at_least: score.
    """

    at_least: float = 1.0
    needs_comparable: Comparable = "global"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Count the entries that reach the threshold.

        Args:
            prefill: not read.
            scores: [L, K, T] float32.
            protected: [T] bool.
            per_head: mean entries per head, at most.

        Returns:
            [L, K] int64, summing to at most L * K * per_head.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_protected = int(protected.sum())
        flat = scores.reshape(-1, n_tokens)
        enough = (flat >= self.at_least) & ~protected
        ceiling = (per_head - n_protected) * flat.shape[0]
        counts = enough.sum(-1) if int(enough.sum()) <= ceiling else counts_of_best(flat, enough, ceiling)
        return counts.reshape(n_layers, n_kv_heads) + n_protected
