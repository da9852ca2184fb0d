"""Random: the baseline that every method has to beat, with the same protected tokens. No paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Random:
    """Score tokens by chance.

    Attributes:
        seed: so that one document always gives one selection.
    """

    seed: int = 0
    comparable: Comparable = "global"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset()

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: only its shape is read.

        Returns:
            [L, K, T] float32 in [0, 1).
        """
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(prefill.keys.shape[:3], generator=generator).to(prefill.keys.device)
