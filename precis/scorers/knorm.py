"""Knorm: keep the shortest keys.

Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430.
Differs from the paper: all layers are compressed (it leaves the first two alone). In float32, since most bfloat16 norms
tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Knorm:
    """Score a token by minus the length of its key."""

    comparable: Comparable = "head"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset()

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: keys [L, K, T, D].

        Returns:
            [L, K, T] float32, not positive.
        """
        lengths: Tensor = torch.linalg.vector_norm(prefill.keys, dim=-1, dtype=torch.float32)
        return -lengths
