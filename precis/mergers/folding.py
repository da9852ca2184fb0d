"""Folding: an evicted entry's value goes into the kept entry whose key is most like its own.

As kvpress' MergingPress, which takes the idea from Bolya et al. 2023, "Token Merging", arXiv:2210.09461, and Wan et al.
2024, "D2O", arXiv:2406.13035. Keys stay. Differs from kvpress: protected entries stay as they are, and budgets may
differ by head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.mergers import Merged

_ROWS = 512  # evicted entries compared at once: bounds memory to 512 x T
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Folding:
    """Weighted means of values.

    Attributes:
        threshold: cosine of two keys below which an evicted entry is dropped.
    """

    threshold: float = 0.0

    def merge(self, prefill: Prefill, plain_keys: Tensor, scores: Tensor, keep: Tensor, protected: Tensor) -> Merged:
        """Fold values head by head; see `Merger`."""
        values = prefill.values.float()
        changed = torch.zeros_like(keep)
        for layer in range(keep.shape[0]):
            for head in range(keep.shape[1]):
                kept = (keep[layer, head] & ~protected).nonzero()[:, 0]
                gone = (~keep[layer, head]).nonzero()[:, 0]
                if kept.shape[0] and gone.shape[0]:
                    changed[layer, head] = self._fold(prefill.keys[layer, head], values[layer, head], kept, gone)
        return Merged(None, values, changed)

    def _fold(self, keys: Tensor, values: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
        """Change values [T, D] of `kept` in place; [T] bool, which changed."""
        units = functional.normalize(keys.float(), dim=-1, eps=_TINY)
        lengths = values.norm(dim=-1)
        sums = torch.zeros(kept.shape[0], values.shape[1], device=values.device)
        totals = torch.zeros(kept.shape[0], device=values.device)
        for some in torch.split(gone, _ROWS):
            likeness, target = (units[some] @ units[kept].T).max(-1)
            weights = likeness.clamp_min(0) * (likeness >= self.threshold)
            weights = weights * lengths[some] / (lengths[some] + lengths[kept[target]] + _TINY)
            sums.index_add_(0, target, weights[:, None] * values[some])
            totals.index_add_(0, target, weights)
        took = totals > 0
        values[kept[took]] = (values[kept] + sums)[took] / (1 + totals[took])[:, None]
        changed = torch.zeros(values.shape[0], dtype=torch.bool, device=values.device)
        changed[kept[took]] = True
        return changed
