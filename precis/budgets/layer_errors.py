"""CompressKV's budgets: a layer gets as much as its output was found to suffer.

Lin et al. 2025, arXiv:2508.02401. As in the paper: 32 entries each, the rest in proportion to the measured errors,
at most three times the mean. The table is measured once per model (`precis.calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.ranking import shared_out
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Budgets by layer, from a table.

    Attributes:
        floor: entries that every kv head is sure of, besides protected ones.
        cap: times the mean, at most.
    """

    floor: int = 32
    cap: float = 3.0
    needs_comparable: Comparable = "head"
    needs: Needs = frozenset()
    nested: Comparable | None = None

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Give each layer its budget, the same to all of its heads.

        Args:
            prefill: with the table `layer_errors` [L].
            scores: [L, K, T]; only its shape is read.
            protected: [T] bool.
            per_head: mean entries per head.

        Returns:
            [L, K] int64.
        """
        n_layers, n_kv_heads, n_tokens = scores.shape
        n_protected = int(protected.sum())
        mean = per_head - n_protected
        floor, most = min(self.floor, mean), min(n_tokens - n_protected, self.cap * mean)
        errors = prefill.table("layer_errors").double().cpu().clamp_min(1e-9)
        wanted = torch.full((n_layers,), float(floor), dtype=torch.float64)
        for _ in range(n_layers):  # what a full layer cannot take goes to the others
            left = mean * n_layers - float(wanted.sum())
            share = errors * (wanted < most)
            if left < 1e-6 or float(share.sum()) == 0:
                break
            wanted = (wanted + left * share / share.sum()).clamp_max(most)
        return (shared_out(wanted, mean * n_layers) + n_protected).to(scores.device)[:, None].expand(-1, n_kv_heads)
