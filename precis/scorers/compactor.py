"""Compactor: keep keys that stand out, and what their neighbours look at.

Chari and Van Durme 2025, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
arXiv:2507.08143.
Differs from the paper: no calibrated choice of the ratio, and leverage by Cholesky, as in kvpress' CompactorPress.
Differs from kvpress: one fixed sketch instead of a new random one per call, logits are scaled, no padding takes part in
the last chunk's softmax, and `blend` is the paper's 0.35 instead of the share removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.observations.leverage import Leverage
from precis.observations.local import LocalAttention
from precis.scorers import Comparable, Kind, Needs, blank

_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Compactor:
    """Score a token by its leverage and by the local attention it gets times ||v||_2, both as z-scores of the layer.

    Attributes:
        blend: weight of leverage.
        kernel: width of the pooling of attention over positions, in tokens.
        leverage: observation.
        attention: observation; with the same ends left out.
    """

    blend: float = 0.35
    kernel: int = 3
    leverage: Leverage = field(default_factory=Leverage)
    attention: LocalAttention = field(default_factory=LocalAttention)
    comparable: Comparable = "layer"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset({self.leverage, self.attention})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: leverage [L, K, T] and local attention [L, H, T].

        Returns:
            [L, K, T] float32; the layer's maximum at both ends, which are to be protected.
        """
        scores = blank(prefill)
        first, last = self.attention.n_first, prefill.n_tokens - self.attention.n_last
        if last <= first:
            return scores
        paid = prefill.geometry.grouped(prefill.seen(self.attention)).mean(2)[..., first:last]
        outlying = prefill.seen(self.leverage)[..., first:last]
        for layer in range(scores.shape[0]):
            norms = torch.linalg.vector_norm(prefill.values[layer, :, first:last], dim=-1, dtype=torch.float32)
            pooled = functional.avg_pool1d(paid[layer] * norms, self.kernel, stride=1, padding=self.kernel // 2)
            both = self.blend * _standard(outlying[layer]) + _standard(pooled)
            scores[layer] = both.max()
            scores[layer, :, first:last] = both
        return scores


def _standard(part: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over heads and tokens of a layer."""
    return (part - part.mean()) / part.std(correction=min(1, part.numel() - 1)).clamp_min(_TINY)
