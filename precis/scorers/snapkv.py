"""SnapKV: keep what the end of the document looks at.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
Differs from the paper: attention is averaged, not summed, over the window (the same ranking), and over the query group
after pooling, because entries are kept per kv head. The window is the end of the document, since no question is
known yet; the paper's window is the question. With W = 64 and kernel 5 scores equal kvpress' SnapKVPress, which also
fills the window's own scores with the maximum; here the window is kept by the policy's protection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.attention.dense import attention_weights
from precis.core import Prefill
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Score a token by the attention that the observed window pays to it.

    Attributes:
        n_window: observed tokens.
        kernel: width of the average pooling over positions, in tokens; odd, else ValueError.
    """

    n_window: int = 64
    kernel: int = 5
    comparable: Comparable = "layer"

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, not {self.kernel}")

    @property
    def needs(self) -> Needs:
        return Needs(n_window=self.n_window)

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.

        Returns:
            [L, K, T] float32, higher = keep; 0 inside the window.
        """
        g = prefill.geometry
        n_tokens = prefill.n_tokens
        scores = torch.zeros(g.n_layers, g.n_kv_heads, n_tokens, device=prefill.keys.device)
        if prefill.queries is None or prefill.queries.shape[2] >= n_tokens:
            return scores
        n_window = prefill.queries.shape[2]
        columns = torch.arange(n_tokens, device=scores.device)[None]
        for layer in range(g.n_layers):
            weights = attention_weights(
                prefill.queries[layer],
                prefill.keys[layer],
                columns[:, -n_window:].T,
                columns,
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
            )
            seen = weights[..., : n_tokens - n_window].mean(2)
            pooled = functional.avg_pool1d(seen, self.kernel, stride=1, padding=self.kernel // 2)
            scores[layer, :, : n_tokens - n_window] = pooled.mean(1)
        return scores
