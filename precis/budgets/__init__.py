"""Allocators: how many entries each kv head may keep. One method, one file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Needs


class Allocator(Protocol):
    """One verb, and what it presupposes.

    Attributes:
        needs_comparable: across what it compares scores.
        needs: observations that `allocate` reads.
        nested: across what smaller budgets keep a subset of the best entries, or None if they need not.
    """

    @property
    def needs_comparable(self) -> Comparable: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def nested(self) -> Comparable | None: ...

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give each kv head its budget.

        Args:
            prefill: for observations beyond the scores.
            scores: [L, K, T] float32, unweighted.
            protected: [T] bool, tokens that every head keeps and that count.
            per_head: mean number of entries per head, at least the number of protected tokens and at most T.

        Returns:
            [L, K] int64, protected tokens included, summing to L * K * per_head; to at most that where the method
            finds its budget itself.
        """
        ...
