"""DefensiveKV's two stages: first what holds most of the observed attention, then what would hurt most if missing.

Feng et al. 2025, "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv:2510.13334.
As in the paper, by way of the authors' repository: stage 1 takes tokens by mean attention until, with the window,
`mass` of it is held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.ranking import rank_per_head
from precis.scorers import Needs


@dataclass(frozen=True, slots=True)
class Defensive:
    """Attention mass first, then the scores.

    Attributes:
        n_window: observed tokens.
        mass: attention that stage 1 secures, the window's own included.
    """

    n_window: int = 32
    mass: float = 0.9
    wants_attention: bool = False
    nested: bool = False

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Keep each head's entries.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.
            scores: [L, K, T] float32.
            budgets: [L, K] int64.
            protected: [T] bool.

        Returns:
            [L, K, T] bool.
        """
        free = (budgets - protected.sum())[..., None]
        mean = torch.zeros_like(scores)
        secured = torch.zeros_like(scores[..., :1])
        for layer, weights in window_attention(prefill, self.n_window):
            seen = weights.mean((1, 2))
            mean[layer, :, : seen.shape[-1]] = seen
            secured[layer] = 1 - seen.sum(-1, keepdim=True)
        secured += mean.masked_fill(~protected, 0).sum(-1, keepdim=True)
        ranks = rank_per_head(mean, protected)
        ordered = torch.zeros_like(mean).scatter_(-1, ranks, mean.masked_fill(protected, 0))
        before = ordered.cumsum(-1) - ordered  # mass of all better tokens
        needed = (before + secured < self.mass).sum(-1, keepdim=True)
        first = (ranks < torch.minimum(needed, free)) & ~protected
        second = rank_per_head(scores, protected | first) < free - first.sum(-1, keepdim=True)
        return protected | first | (second & ~first & ~protected)
