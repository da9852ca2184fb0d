"""G-KV: what was attended before counts on, and of entries that repeat each other the older ones go.

Liao et al. 2025, "G-KV: Decoding-Time KV Cache Eviction with Global Attention", arXiv:2512.00504.
As in its code: every 128 tokens; the attention of the last 16 queries, divided by its maximum, is merged into the
memory by max(alpha * memory, attention); redundancy is the mean cosine to similar keys, the last of them exempt; both
are mixed by `mix`. Differs from the code: attention is averaged over the query group, and the budget is that of the
answer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class GKV:
    """Global attention against redundancy.

    Attributes:
        budget: entries of the answer per kv head, the last `n_window` included.
        decay: of the memory at every look (alpha).
        mix: weight of attention against redundancy (lambda).
        similar: cosine from which two keys repeat each other.
    """

    budget: int = 1024
    every: int = 128
    n_window: int = 16
    decay: float = 0.8
    mix: float = 0.5
    similar: float = 0.5

    def __post_init__(self) -> None:
        if self.budget < self.n_window:
            raise ValueError(f"budget must be at least {self.n_window}, not {self.budget}")

    def keep(self, weights: Tensor, rows: Tensor, keys: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See `Trim`."""
        local = weights.mean((0, 1))
        attended = torch.maximum(self.decay * memory, local / local.max().clamp_min(_TINY))
        kept = torch.ones(attended.shape, dtype=torch.bool, device=attended.device)
        if attended.shape[0] <= self.budget:
            return kept, attended
        scores = self.mix * attended - (1 - self.mix) * self.redundancy(keys)
        older = attended.shape[0] - self.n_window
        order = torch.sort(scores[:older].flip(0), descending=True, stable=True).indices  # of equals the later one
        kept[older - 1 - order[self.budget - self.n_window :]] = False
        return kept, attended

    def redundancy(self, keys: Tensor) -> Tensor:
        """How much each key [m, D] repeats others: [m] float32, 1 at most, 0 for the last of those alike."""
        units = functional.normalize(keys.float(), dim=-1)
        likeness = units @ units.T
        likeness = likeness.masked_fill_(likeness < self.similar, 0).fill_diagonal_(0)
        has_later = likeness.triu(1).amax(-1) > 0
        mean = likeness.mean(-1) * has_later
        return mean / mean.max().clamp_min(_TINY)
