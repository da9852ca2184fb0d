"""ClusterKV: at every token, the clusters of keys whose centre the query likes best.

Liu et al. 2024, "ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression", arXiv:2412.03213.
As in the paper: k-means by cosine over the keys without the first 16, centres are means of the raw keys, whole clusters
are taken until the budget is full, and the first two layers read everything. Differs from the paper: one set per kv
head, by the best query of its group; the last cluster is cut by the logits of its members, not by stored order;
k-means starts from evenly spaced keys, so that one snapshot gives one index; the answer's tokens are never clustered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.views import Index


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Whole clusters of similar keys.

    Attributes:
        budget: entries per kv head, sinks included.
        index_size: entries per cluster, on average.
        n_sink: first tokens of the context, always visible.
        n_rounds: of k-means.
        dense_layers: first layers, which read everything.
    """

    budget: int = 512
    index_size: int = 80
    n_sink: int = 16
    n_rounds: int = 10
    dense_layers: int = 2
    every_step: bool = True
    n_sliding: int = 0

    def prepare(self, keys: Tensor, positions: Tensor) -> Index:
        """Cluster one kv head's keys.

        Args:
            keys: [n, D].
            positions: [n] int32.

        Returns:
            Centres [clusters, D] float32, and of each entry its cluster [n] int64, -1 for sinks.
        """
        members = torch.full(positions.shape, -1, dtype=torch.int64, device=keys.device)
        free = (positions >= self.n_sink).nonzero()[:, 0]
        if free.shape[0] == 0:
            return keys.new_zeros(0, keys.shape[1]), members
        points = keys[free].float()
        n_clusters = max(1, free.shape[0] // self.index_size)
        centres = points[torch.linspace(0, free.shape[0] - 1, n_clusters, device=keys.device).long()]
        nearest = members[free]
        for _ in range(self.n_rounds):
            nearest = (functional.normalize(points, dim=-1) @ functional.normalize(centres, dim=-1).T).argmax(-1)
            sums = torch.zeros_like(centres).index_add_(0, nearest, points)
            sizes = torch.bincount(nearest, minlength=n_clusters)[:, None]
            centres = torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)
        members[free] = nearest
        return centres, members

    def select(self, query: Tensor, keys: Tensor, positions: Tensor, index: Index) -> Tensor:
        """Choose what one kv head sees at this token.

        Args:
            query: [G, D].
            keys: [n, D].
            positions: [n] int32, not read.
            index: centres and members.

        Returns:
            [m] int64 ascending, m <= budget, or all n where they fit.
        """
        centres, members = index
        if keys.shape[0] <= self.budget:
            return torch.arange(keys.shape[0], device=keys.device)
        liking = (query.float() @ centres.T).amax(0)
        order = torch.empty_like(liking, dtype=torch.int64)
        order[liking.argsort(descending=True)] = torch.arange(liking.shape[0], device=keys.device)
        logits = (query.float() @ keys.float().T).amax(0)
        by_logit = logits.argsort(descending=True)
        rank = torch.where(members < 0, -1, order[members.clamp_min(0)])[by_logit]
        chosen = by_logit[rank.argsort(stable=True)[: self.budget]]
        return chosen.sort().values
