"""Uniform: every kv head keeps as many entries as every other.

The budget of SnapKV (arXiv:2404.14469), CriticalKV (arXiv:2502.03805) and SAGE-KV (arXiv:2503.08879). As in the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Uniform:
    """The same budget for every head."""

    needs_comparable: Comparable = "head"
    nested: Comparable | None = "head"

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give every head `per_head`.

        Args:
            prefill: not read.
            scores: [L, K, T]; only its shape is read.
            protected: [T] bool, not read.
            per_head: entries per head.

        Returns:
            [L, K] int64.
        """
        return torch.full(scores.shape[:2], per_head, dtype=torch.int64, device=scores.device)
