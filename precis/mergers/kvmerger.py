"""KVMerger: runs of neighbours with similar keys become one entry each.

Wang et al. 2024, "Model Tells You Where to Merge: Adaptive KV Cache Merging for LLMs on Long-Context Tasks",
arXiv:2407.08454.
As in the paper: heavy hitters stay unmerged; elsewhere, neighbours whose keys' cosine is above a threshold form a
set; its pivot is the token with the most attention, and the set's entry is the mean weighted by a Gaussian around it.
Differs from the paper: the threshold is the one, per kv head, that makes as many sets as the budget has places (where
even runs that never merge are too many, those with the least attended pivots are dropped); keys are averaged before
RoPE and turned to the pivot's position; and the entry's logit gets log |S| on top, since it stands for |S| tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from precis.core import Prefill
from precis.mergers import Merged
from precis.ranking import rank_per_head
from precis.scorers import Needs

_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class KVMerger:
    """A selector (the pivots) and a merger (what they take in).

    Attributes:
        heavy_share: share of the free budget that goes to the most attended tokens, which stay as they are.
    """

    heavy_share: float = 0.25
    needs: Needs = frozenset()
    wants_attention: bool = True
    nested: bool = False

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Keep protected tokens, heavy hitters and one pivot per set.

        Args:
            prefill: the keys, after RoPE, tell which neighbours are alike.
            scores: [L, K, T] float32 attention.
            budgets: [L, K] int64.
            protected: [T] bool.

        Returns:
            [L, K, T] bool.
        """
        return self._sets(prefill.keys, scores, budgets, protected)[1]

    def merge(self, prefill: Prefill, plain_keys: Tensor, scores: Tensor, keep: Tensor, protected: Tensor) -> Merged:
        """Average each set around its pivot; see `Merger`."""
        sets, pivots = self._sets(prefill.keys, scores, keep.sum(-1), protected)
        centres = _summed(sets, plain_keys * pivots[..., None])
        distance = (plain_keys - centres).norm(dim=-1, keepdim=True)
        sizes = _summed(sets, torch.ones_like(distance))
        sigma = _summed(sets, distance) / (2**0.5 * sizes)
        weights = torch.exp(-((distance / sigma.clamp_min(_TINY)) ** 2) / 2)
        weights /= _summed(sets, weights).clamp_min(_TINY)  # a set whose pivot was dropped is of no account
        keys = _summed(sets, plain_keys * weights)
        values = _summed(sets, prefill.values.float() * weights)
        return Merged(keys, values, pivots & (sizes[..., 0] > 1), sizes[..., 0].log())

    def _sets(self, keys: Tensor, scores: Tensor, budgets: Tensor, protected: Tensor) -> tuple[Tensor, Tensor]:
        """[L, K, T] int64, the set of each token inside its head; [L, K, T] bool, the pivots that are kept."""
        n_heavy = (budgets - protected.sum()) * self.heavy_share
        fixed = protected | (rank_per_head(scores, protected) < n_heavy.long()[..., None])
        links = functional.cosine_similarity(keys[:, :, :-1].float(), keys[:, :, 1:].float(), dim=-1)
        inner = ~fixed[..., :-1] & ~fixed[..., 1:]
        n_sets = fixed.sum(-1) + (~fixed).sum(-1) - inner.sum(-1)  # if no run were cut
        cut = inner & (rank_per_head(-links, ~inner) < (budgets - n_sets)[..., None])
        starts = functional.pad(~inner | cut, (1, 0), value=True)
        sets = starts.cumsum(-1) - 1
        best = torch.full_like(scores, float("-inf")).scatter_reduce(-1, sets, scores, "amax").gather(-1, sets)
        places = torch.arange(scores.shape[-1], device=scores.device).expand_as(sets)
        candidates = torch.where(scores == best, places, -1)
        pivots = places == torch.zeros_like(sets).scatter_reduce(-1, sets, candidates, "amax").gather(-1, sets)
        first = scores.masked_fill(fixed, float("inf"))
        return sets, pivots & (rank_per_head(first, ~pivots) < budgets[..., None])


def _summed(sets: Tensor, entries: Tensor) -> Tensor:
    """[L, K, T, D] -> for every token the sum over its set."""
    index = sets[..., None].expand_as(entries)
    return torch.zeros_like(entries).scatter_add_(2, index, entries).gather(2, index)
