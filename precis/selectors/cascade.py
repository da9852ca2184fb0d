"""CascadingKV: like a sliding window whose older parts are ever sparser, so that it reaches exponentially further back.

Willette et al. 2024, "Training-Free Exponential Context Extension via Cascading KV Cache", arXiv:2406.17808.
Differs from the paper: run over the indices after a normal prefill, with the document's mean attention as the score
that decides which of two tokens stays, one decision for all heads of a layer, and positions are not re-indexed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.ranking import rank_per_head
from precis.scorers import Needs


@dataclass(frozen=True, slots=True)
class Cascade:
    """A chain of windows; each accepts every other token that leaves the one before.

    Attributes:
        n_windows: windows in the chain.
    """

    n_windows: int = 4
    wants_attention: bool = False
    nested: bool = False

    @property
    def needs(self) -> Needs:
        return frozenset()

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Keep what is left in the chain when the last token has entered it.

        Args:
            prefill: not read.
            scores: [L, K, T] float32; their mean over heads decides between two tokens.
            budgets: [L, K] int64, equal inside a layer.
            protected: [T] bool.

        Returns:
            [L, K, T] bool.
        """
        open_tokens = (~protected).nonzero()[:, 0].tolist()
        keep = protected.expand(scores.shape).clone()
        free = budgets - protected.sum()
        for layer, layer_scores in enumerate(scores):
            kept = self._run(open_tokens, layer_scores.mean(0).tolist(), int(free[layer].min()))
            keep[layer, :, kept] = True
        missing = (budgets - keep.sum(-1))[..., None]  # heads with larger budgets, or a remainder of the division
        return keep | (rank_per_head(scores, keep) < missing)

    def _run(self, tokens: list[int], scores: list[float], room: int) -> list[int]:
        sizes = [room // self.n_windows] * self.n_windows
        sizes[0] += room % self.n_windows
        windows: list[deque[int]] = [deque() for _ in sizes]
        arrivals = [0] * self.n_windows
        for token in tokens:
            offered = token
            for index, (window, size) in enumerate(zip(windows, sizes, strict=True)):
                arrivals[index] += 1
                if size == 0:
                    break
                if len(window) < size:
                    window.append(offered)
                    break
                if index and arrivals[index] % 2 == 0:  # not accepted: the better of it and the newest one stays
                    if scores[offered] > scores[window[-1]]:
                        window[-1] = offered
                    break
                window.append(offered)
                offered = window.popleft()
        return [token for window in windows for token in window]
