"""Quest: at every token, the pages whose best possible logit is highest.

Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv:2406.10774.
As in the paper: pages of 16 entries, bounded channel by channel by their smallest and largest key; at least three
pages; the first two layers, and the question itself, read everything. Differs from the paper: one set of pages per kv
head, by the highest bound of its query group, and pages run over the kept entries, whose bounds hold all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.views import Index

_LEAST_PAGES = 3


@dataclass(frozen=True, slots=True)
class QuestView:
    """Whole pages of neighbouring entries.

    Attributes:
        budget: entries per kv head, in whole pages.
        index_size: entries per page.
        dense_layers: first layers, which read everything.
    """

    budget: int = 512
    index_size: int = 16
    dense_layers: int = 2
    every_step: bool = True
    n_sliding: int = 0

    def prepare(self, keys: Tensor, positions: Tensor) -> Index:
        """Bounds of each page.

        Args:
            keys: [n, D].
            positions: [n] int32, not read.

        Returns:
            Smallest and largest key [pages, D] float32, channel by channel.
        """
        n, dim = keys.shape
        if n == 0:
            return keys.new_zeros(0, dim), keys.new_zeros(0, dim)
        padded = torch.cat([keys.float(), keys[-1:].float().expand(-n % self.index_size, dim)])
        pages = padded.reshape(-1, self.index_size, dim)
        return pages.amin(1), pages.amax(1)

    def select(self, query: Tensor, keys: Tensor, positions: Tensor, index: Index) -> Tensor:
        """Choose what one kv head sees at this token.

        Args:
            query: [G, D].
            keys: [n, D]; only their number is read.
            positions: [n] int32, not read.
            index: bounds of each page.

        Returns:
            [m] int64 ascending.
        """
        low, high = index
        n_pages = max(_LEAST_PAGES, self.budget // self.index_size)
        if low.shape[0] <= n_pages:
            return torch.arange(keys.shape[0], device=keys.device)
        bound = torch.maximum(query.float()[:, None] * low, query.float()[:, None] * high).sum(-1).amax(0)
        pages = bound.topk(n_pages).indices.sort().values
        entries = (pages[:, None] * self.index_size + torch.arange(self.index_size, device=keys.device)).flatten()
        return entries[entries < keys.shape[0]]
