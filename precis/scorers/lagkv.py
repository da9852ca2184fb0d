"""LagKV: keep the tokens that stand out against the block that follows them.

Liang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
arXiv:2504.04704.
Differs from the paper: a channel that is constant in the reference block counts as 0 instead of dividing by zero.
Defaults are those of kvpress' LagKVPress.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.ranking import rank_per_head
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class LagKV:
    """Score a token by its rank, inside its block, of how unevenly its channels lie in the next block's range.

    Attributes:
        lag: tokens per block.
        n_sink: first tokens, outside of the blocks.
    """

    lag: int = 128
    n_sink: int = 4
    comparable: Comparable = "global"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset()

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: keys and values [L, K, T, D].

        Returns:
            [L, K, T] float32 in [0, 1]; 1 for sinks, for the last full block and for what follows it; by recency where
            the context is shorter than two blocks.
        """
        n_tokens = prefill.n_tokens
        n_blocks = (n_tokens - self.n_sink) // self.lag
        if n_blocks < 2:
            recency = torch.arange(n_tokens, device=prefill.keys.device) / n_tokens
            return recency.float().expand(prefill.keys.shape[:3])
        scores = blank(prefill) + 1
        stop = self.n_sink + (n_blocks - 1) * self.lag
        for layer in range(prefill.geometry.n_layers):
            both = [self._unevenness(part[layer], n_blocks) for part in (prefill.keys, prefill.values)]
            mean = (both[0] + both[1]) / 2
            ranks = rank_per_head(mean, torch.zeros(self.lag, dtype=torch.bool, device=mean.device))
            scores[layer, :, self.n_sink : stop] = ((self.lag - 1 - ranks) / self.lag).flatten(1)
        return scores

    def _unevenness(self, part: Tensor, n_blocks: int) -> Tensor:
        """Keys or values [K, T, D] of a layer -> [K, blocks - 1, lag]."""
        inside = part[:, self.n_sink : self.n_sink + n_blocks * self.lag].float()
        blocks = inside.reshape(part.shape[0], n_blocks, self.lag, -1)
        low, high = blocks[:, 1:].amin(2, keepdim=True), blocks[:, 1:].amax(2, keepdim=True)
        span = high - low
        relative = torch.where(span > 0, (blocks[:, :-1] - low) / span, 0.0)
        return relative.std(-1).softmax(-1)
