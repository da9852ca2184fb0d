"""H2O: keep what the whole document looked at most.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
arXiv:2306.14048.
Differs from the paper: applied once after prefill, and averaged over the query group. As in kvpress'
ObservedAttentionPress each sum is divided by the number of rows that could see the token, else early tokens win.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.observations.columns import ColumnSums
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class H2O:
    """Score a token by the mean attention of all rows that can see it."""

    comparable: Comparable = "layer"
    kind: Kind = "attention"

    @property
    def needs(self) -> Needs:
        return frozenset({ColumnSums(mean=True)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: column means [L, H, T].

        Returns:
            [L, K, T] float32.
        """
        return prefill.geometry.grouped(prefill.seen(ColumnSums(mean=True))).mean(2)
