"""DefensiveKV: judge a token by the worst case over the observed rows, not by their mean.

Feng et al. 2025, "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv:2510.13334.
Differs from the paper: the observed window is the end of the document, as in the question-agnostic tables of the
authors' repository. As there: rows are pooled and rescaled to their mass, the worst case has the head's mean as floor,
and is weighted with ||v W_o||_1 relative to the other kv heads at the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.observations.norms import OutputNorms
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank

_TINY = 1e-20


@dataclass(frozen=True, slots=True)
class Defensive:
    """Score a token by the largest attention of any observed row and head, times relative output norm.

    Attributes:
        n_window: observed tokens.
        kernel: width of the average pooling over positions, in tokens; odd.
    """

    n_window: int = 32
    kernel: int = 5
    comparable: Comparable = "global"
    kind: Kind = "weighted"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window), OutputNorms()})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens, output norms [L, H, T].

        Returns:
            [L, K, T] float32; 0 inside the window.
        """
        scores = blank(prefill)
        norms = prefill.geometry.grouped(prefill.seen(OutputNorms())).mean(2)
        norms = norms / norms.sum(1, keepdim=True).clamp_min(_TINY)
        for layer, weights in window_attention(prefill, self.n_window):
            rows = weights.flatten(0, 2)
            pooled = functional.avg_pool1d(rows, self.kernel, stride=1, padding=self.kernel // 2)
            pooled *= rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(_TINY)
            worst = pooled.view(weights.shape).amax((1, 2))
            worst = torch.maximum(worst, worst.mean(-1, keepdim=True))
            n_seen = weights.shape[-1]
            scores[layer, :, :n_seen] = worst * norms[layer, :, :n_seen]
        return scores
