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

import torch
from torch import Tensor
from torch.nn import functional

from precis.attention.dense import attention_weights
from precis.core import Prefill
from precis.observations.window import WindowQueries
from precis.scorers import Comparable, Kind, Needs


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
        g = prefill.geometry
        scores = torch.zeros(g.n_layers, g.n_kv_heads, prefill.n_tokens, device=prefill.keys.device)
        n_seen = prefill.n_tokens - self.n_window
        if n_seen <= 0:
            return scores
        pool = functional.avg_pool1d if self.pooling == "average" else functional.max_pool1d
        queries = prefill.seen(WindowQueries(self.n_window))
        columns = torch.arange(prefill.n_tokens, device=scores.device)[None]
        for layer in range(g.n_layers):
            weights = attention_weights(
                queries[layer],
                prefill.keys[layer],
                columns[:, n_seen:].T,
                columns,
                scaling=g.scaling[layer],
                softcap=g.softcap[layer],
            )
            seen = weights[..., :n_seen].mean(2)
            scores[layer, :, :n_seen] = pool(seen, self.kernel, stride=1, padding=self.kernel // 2).mean(1)
        return scores
