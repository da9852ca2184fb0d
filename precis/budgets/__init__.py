"""Allocators: how many entries each kv head may keep. One method, one file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from precis.scorers import Comparable


class Allocator(Protocol):
    """One verb, and what it presupposes.

    Attributes:
        needs_comparable: across what it compares scores.
    """

    @property
    def needs_comparable(self) -> Comparable: ...

    def allocate(self, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give each kv head its budget.

        Args:
            scores: [L, K, T] float32, unweighted.
            protected: [T] bool, tokens that every head keeps and that count.
            per_head: mean number of entries per head, at least the number of protected tokens and at most T.

        Returns:
            [L, K] int64, protected tokens included, summing to L * K * per_head.
        """
        ...
