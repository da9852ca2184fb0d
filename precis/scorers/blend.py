"""Blend: several scorers at once, by the largest of their scores.

No paper. Scores of each part are divided by their mean over the best entries, so that parts in different units
can be mixed, and weighted. The maximum lets every part save what it alone finds important.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Kind, Needs, Scorer

_BEST_SHARE = 0.1
_TINY = 1e-20


@dataclass(frozen=True, slots=True)
class Blend:
    """The entrywise maximum of weighted, scaled scores; all parts must give scores that are not negative.

    Attributes:
        parts: scorers.
        weights: per part.
    """

    parts: tuple[Scorer, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError("Blend needs one weight per part, and at least one part")

    @property
    def comparable(self) -> Comparable:
        found: set[Comparable] = {part.comparable for part in self.parts}
        narrowest: Comparable = "head" if "head" in found else "layer" if "layer" in found else "global"
        return narrowest

    @property
    def kind(self) -> Kind:
        kinds: set[Kind] = {part.kind for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else "other"

    @property
    def needs(self) -> Needs:
        return frozenset[object]().union(*(part.needs for part in self.parts))  # type: ignore[return-value]

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: what the parts need.

        Returns:
            [L, K, T] float32.
        """
        scaled = []
        for part, weight in zip(self.parts, self.weights, strict=True):
            scores = part.score(prefill)
            best = scores.flatten().topk(max(1, int(_BEST_SHARE * scores.numel()))).values
            scaled.append(scores * (weight / best.mean().clamp_min(_TINY)))
        return torch.stack(scaled).amax(0)
