"""Probing: keep what representative questions, given with the document, and the answers to them look at.

No paper: the rows of FINCH's and SnapKV's question window, extended by the model's own answer and reduced by
the maximum as in KVzip, so that every probe's evidence survives however many probes there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.observations.probes import ProbeAttention
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Probing:
    """Score a token by the largest attention of any probe row and any query head of its group.

    Attributes:
        n_answer: tokens answered per probe.
    """

    n_answer: int = 24
    comparable: Comparable = "global"
    kind: Kind = "attention"

    @property
    def needs(self) -> Needs:
        return frozenset({ProbeAttention(self.n_answer)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: probe attention [L, H, T].

        Returns:
            [L, K, T] float32 probabilities; all 0 without probes.
        """
        return prefill.geometry.grouped(prefill.seen(ProbeAttention(self.n_answer))).amax(2)
