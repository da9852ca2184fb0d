"""KeyDiff: keep the keys that are least like the average key.

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", arXiv:2504.15364.
Differs from the paper: scored once over the whole context instead of block by block. As in kvpress' KeyDiffPress.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """Score a token by minus the cosine between its key and the mean direction of all keys."""

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
            [L, K, T] float32 in [-1, 1].
        """
        found = []
        for keys in prefill.keys:  # a layer at a time: float32 copies of all keys would be the size of the cache
            anchor = functional.normalize(keys.float(), dim=-1).mean(1, keepdim=True)
            found.append(-functional.cosine_similarity(keys.float(), anchor, dim=-1))
        return torch.stack(found)
