"""PyramidKV: lower layers keep more than upper ones.

Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv:2406.02069.
Differs from the paper: budgets sum exactly to the whole, and protected tokens (the paper's window) are part of the
budget of every layer. With `beta` = 1 all layers get the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.ranking import shared_out
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Pyramid:
    """Budgets that fall linearly from the first layer to the last.

    Attributes:
        beta: the last layer gets 1 / beta of the mean; at least 1.
    """

    beta: float = 20.0
    needs_comparable: Comparable = "head"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset()

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give each layer its budget, the same to all of its heads.

        Args:
            prefill: not read.
            scores: [L, K, T]; only its shape is read.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64. Where the first layer's share would exceed T the pyramid flattens.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_protected = int(protected.sum())
        mean, most = per_head - n_protected, n_tokens - n_protected
        last = mean / self.beta
        first = 2 * mean - last
        if first > most:
            first, last = float(most), 2.0 * mean - most
        if n_layers == 1:
            first = last = float(mean)
        wanted = torch.linspace(first, last, n_layers, dtype=torch.float64)
        return (shared_out(wanted, mean * n_layers) + n_protected).to(scores.device)[:, None].expand(-1, n_kv_heads)
