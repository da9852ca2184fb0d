"""ExpectedAttention: keep what queries distributed like the document's own are expected to look at.

Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
arXiv:2510.00636.
As in the paper and kvpress' ExpectedAttentionPress: the expectation of exp(q k) over a Gaussian q in closed form,
times ||v||_2. The moments are accumulated before RoPE from the queries that the prefill computes anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.moments import QueryMoments
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class Expected:
    """Score a token by its expected attention from future queries.

    Attributes:
        n_sink: first tokens, neither scored nor counted; protect them.
        n_future: positions after the context that are averaged over.
        value_norm: multiply with ||v||_2; leave it out under CriticalKV, which weights by itself.
        epsilon: added before that, so that unattended tokens are ordered by value norm.
    """

    n_sink: int = 4
    n_future: int = 512
    value_norm: bool = True
    epsilon: float = 0.0
    comparable: Comparable = "layer"

    @property
    def kind(self) -> Kind:
        return "weighted" if self.value_norm else "attention"

    @property
    def needs(self) -> Needs:
        return frozenset({QueryMoments(self.n_sink, self.n_future)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: query moments [L, H, 1 + D, D].

        Returns:
            [L, K, T] float32, not negative; 0 for the first `n_sink` tokens.
        """
        scores = blank(prefill)
        g, moments = prefill.geometry, prefill.seen(QueryMoments(self.n_sink, self.n_future))
        if prefill.n_tokens <= self.n_sink:
            return scores
        for layer in range(g.n_layers):
            mean, covariance = moments[layer, :, :1], moments[layer, :, 1:]
            keys = prefill.keys[layer, :, self.n_sink :].float().repeat_interleave(g.group_size, 0)
            logits = (keys @ mean.transpose(1, 2))[..., 0] * g.scaling[layer]
            logits += (keys @ covariance * keys).sum(-1) * g.scaling[layer] ** 2 / 2
            expected = torch.softmax(logits, -1).reshape(g.n_kv_heads, g.group_size, -1).mean(1)
            if self.value_norm:
                norms = torch.linalg.vector_norm(prefill.values[layer, :, self.n_sink :], dim=-1, dtype=torch.float32)
                expected = (expected + self.epsilon) * norms
            scores[layer, :, self.n_sink :] = expected
        return scores
