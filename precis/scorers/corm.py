"""CORM: keep what any recent token found more than averagely interesting.

Dai et al. 2024, "CORM: Cache Optimization with Recent Message for Large Language Model Inference", arXiv:2404.15949.
As in the paper, applied once after prefill: a token is kept if any of the last W rows, in any head of its group, paid
it at least 1 / (number of visible tokens). Scores are that attention in units of the uniform one, so that the policy
keeps scores from 1 on, and a smaller budget keeps the highest.
Differs from the paper: W is 64 (the paper has 256), like the window of the other policies here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class Corm:
    """Score a token by the largest attention of the last rows, relative to uniform attention.

    Attributes:
        n_window: observed tokens.
    """

    n_window: int = 64
    comparable: Comparable = "global"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.

        Returns:
            [L, K, T] float32; 0 inside the window.
        """
        scores = blank(prefill)
        for layer, weights in window_attention(prefill, self.n_window):
            n_seen = weights.shape[-1]
            visible = torch.arange(n_seen + 1, prefill.n_tokens + 1, device=weights.device)[:, None]
            scores[layer, :, :n_seen] = (weights * visible).amax((1, 2))
        return scores
