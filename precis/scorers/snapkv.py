"""SnapKV: keep what the end of the document looks at.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
Differs from the paper: attention is averaged, not summed, over the window (the same ranking), and over the query group
after pooling, because entries are kept per kv head. The window is the end of the document, since no question is
known yet; the paper's window is the question. With W = 64 and kernel 5 scores equal kvpress' SnapKVPress, which also
fills the window's own scores with the maximum; here the window is kept by the policy's protection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Score a token by the attention that the observed window pays to it.

    Attributes:
        n_window: observed tokens.
        kernel: width of the pooling over positions, in tokens; odd, else ValueError.
        pooling: average, or maximum as in AdaKV's code.
    """

    n_window: int = 64
    kernel: int = 5
    pooling: Literal["average", "maximum"] = "average"
    comparable: Comparable = "layer"
    kind: Kind = "attention"

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, not {self.kernel}")

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.

        Returns:
            [L, K, T] float32, higher = keep; 0 inside the window.
        """
        scores = blank(prefill)
        pool = functional.avg_pool1d if self.pooling == "average" else functional.max_pool1d
        for layer, weights in window_attention(prefill, self.n_window):
            pooled = pool(weights.mean(2), self.kernel, stride=1, padding=self.kernel // 2)
            scores[layer, :, : weights.shape[-1]] = pooled.mean(1)
        return scores
