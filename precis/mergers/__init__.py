"""Mergers: what becomes of evicted entries instead of nothing. One method, one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from precis.core import Prefill


@dataclass(frozen=True, slots=True)
class Merged:
    """Entries after merging; only those of kept tokens count.

    Attributes:
        keys: [L, K, T, D] float32 before RoPE, or None where the merger leaves keys alone.
        values: [L, K, T, D] float32.
        changed: [L, K, T] bool, entries that took something in.
        bias: [L, K, T] float32, added to an entry's logit, or None.
    """

    keys: Tensor | None
    values: Tensor
    changed: Tensor
    bias: Tensor | None = None


class Merger(Protocol):
    """One verb."""

    def merge(self, prefill: Prefill, plain_keys: Tensor, scores: Tensor, keep: Tensor, protected: Tensor) -> Merged:
        """Give kept entries their share of the evicted ones.

        Args:
            prefill: keys after RoPE and values, of the layers that evict.
            plain_keys: [L, K, T, D] float32, the keys before RoPE.
            scores: [L, K, T] float32.
            keep: [L, K, T] bool.
            protected: [T] bool; these entries stay as they are.
        """
        ...
