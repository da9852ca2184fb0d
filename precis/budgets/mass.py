"""DBudgetKV: evict in a fixed order until the attention's norm would suffer; the budget is an output.

Ni et al. 2025, "DBudgetKV: Dynamic Budget in KV Cache Compression for Ensuring Optimal Performance",
arXiv:2502.16886.
Differs from the paper: protected tokens (the sinks) are left out of both norms, since their weight would hide the loss
of all others; a budget can be given as a ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.ranking import rank_per_head
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class Mass:
    """The smallest budget per layer that holds enough of the last token's attention, by Frobenius norm.

    Attributes:
        loss: relative loss of the norm that is allowed.
    """

    loss: float = 0.01
    needs_comparable: Comparable = "head"
    nested: Comparable | None = None

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(1)})

    def allocate(self, prefill: Prefill, scores: Tensor, protected: Tensor, per_head: int) -> Tensor:
        """Find each layer's budget, the same for all of its heads.

        Args:
            prefill: the last token's queries [L, H, 1, D].
            scores: [L, K, T] float32; entries are evicted from the lowest on.
            protected: [T] bool.
            per_head: entries per head, at most.

        Returns:
            [L, K] int64.
        """
        n_protected = int(protected.sum())
        budgets = torch.full(scores.shape[:2], per_head, dtype=torch.int64, device=scores.device)
        ranks = rank_per_head(scores, protected)
        for layer, weights in window_attention(prefill, 1):
            squares = torch.zeros_like(scores[layer])
            squares[:, :-1] = weights[:, :, 0].square().mean(1)
            ordered = torch.zeros_like(squares).scatter_(1, ranks[layer], squares.masked_fill(protected, 0)).sum(0)
            reached = ordered.cumsum(0).sqrt() >= (1 - self.loss) * ordered.sum().sqrt()
            needed = int(reached.float().argmax()) + 1
            budgets[layer] = min(per_head, needed + n_protected)
        return budgets
