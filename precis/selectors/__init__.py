"""Selectors: which entries a kv head keeps, given scores and its budget. One method, one file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from precis.core import Prefill
from precis.scorers import Needs


class Selector(Protocol):
    """One verb, and what it presupposes.

    Attributes:
        needs: observations that `select` reads.
        wants_attention: whether scores must be plain attention weights.
        nested: whether a smaller budget's selection lies within a larger one's.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def wants_attention(self) -> bool: ...

    @property
    def nested(self) -> bool: ...

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Choose entries.

        Args:
            prefill: for observations beyond the scores.
            scores: [L, K, T] float32.
            budgets: [L, K] int64, protected tokens included.
            protected: [T] bool, kept by every head.

        Returns:
            [L, K, T] bool, True = keep; each head keeps exactly its budget.
        """
        ...
