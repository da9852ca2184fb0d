"""SAGE-KV as a view: one top-k per kv head from the last query token, over a snapshot that stays as it is.

Wang et al. 2025, "LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction for Efficient Long-Context
Inference", arXiv:2503.08879.
As in the paper: selected once, after the query's prefill, per token and per head; sinks and recent tokens are kept;
with `slides`, every token of the answer takes the place of the oldest recent one, so that the size stays constant.
Differs from the paper: the snapshot serves other queries unchanged, the question stays visible, without `slides` so
does the whole answer, and the group's logits are summed, on which the paper is silent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.views import Index


@dataclass(frozen=True, slots=True)
class SageView:
    """Sinks, recent tokens, and the entries with the largest logits.

    Attributes:
        budget: entries per kv head: `n_sink`, half of it the best by logit, the rest the most recent.
        slides: whether the recent tokens make room for those of the answer.
        n_sink: first tokens, always visible.
    """

    budget: int = 512
    slides: bool = False
    n_sink: int = 4
    every_step: bool = False
    dense_layers: int = 0
    index_size: int = 0

    def __post_init__(self) -> None:
        if self.budget < 2 * self.n_sink + 2:
            raise ValueError(f"budget must be at least {2 * self.n_sink + 2}, not {self.budget}")

    @property
    def n_sliding(self) -> int:
        """The recent tokens, where they slide."""
        return self._n_recent if self.slides else 0

    @property
    def _n_recent(self) -> int:
        return self.budget - self.budget // 2 - self.n_sink

    def prepare(self, keys: Tensor, positions: Tensor) -> Index:
        """Nothing: the keys themselves are scored."""
        return ()

    def select(self, query: Tensor, keys: Tensor, positions: Tensor, index: Index) -> Tensor:
        """Choose what one kv head sees.

        Args:
            query: [G, D] of the last query token.
            keys: [n, D].
            positions: [n] int32.
            index: empty.

        Returns:
            [m] int64 ascending, m <= budget, or all n where they fit.
        """
        n = keys.shape[0]
        if n <= self.budget:
            return torch.arange(n, device=keys.device)
        fixed = positions < self.n_sink
        fixed[n - self._n_recent :] = True
        logits = (query.float() @ keys.float().T).sum(0).masked_fill(fixed, float("-inf"))
        best = torch.sort(logits.flip(0), descending=True, stable=True).indices[: self.budget - int(fixed.sum())]
        fixed[n - 1 - best] = True
        return fixed.nonzero()[:, 0]
