"""CriticalKV: spend half of the budget on attention, the rest on what would move the output most.

Feng et al. 2025, "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
arXiv:2502.03805.
As in the paper: stage 1 takes the best `first_stage` share by attention, stage 2 fills up by attention times
||v W_o||_1, which minimises the bound on the attention output's L1 error once stage 1 holds over half of the mass.
Differs from kvpress: protected tokens stand outside of both stages (there they take stage-1 places, since their scores
are set to the maximum), and the budget of stage 1 is a share of the free budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from precis.core import Prefill
from precis.observations.norms import OutputNorms
from precis.ranking import rank_per_head
from precis.scorers import Needs


@dataclass(frozen=True, slots=True)
class TwoStage:
    """Attention first, then output perturbation.

    Attributes:
        first_stage: share of the free budget chosen by attention alone, in [0, 1].
        epsilon: added to attention before weighting, so that unattended tokens are ordered by value norm.
        order: of the norm: 1 as in the paper; 2, which the paper found as good, costs a seventh of it.
    """

    first_stage: float = 0.5
    epsilon: float = 1e-4
    order: Literal[1, 2] = 1
    wants_attention: bool = True
    nested: bool = False

    @property
    def needs(self) -> Needs:
        return frozenset({OutputNorms(self.order)})

    def select(self, prefill: Prefill, scores: Tensor, budgets: Tensor, protected: Tensor) -> Tensor:
        """Keep each head's critical entries.

        Args:
            prefill: output norms [L, H, T], of which the group's mean is taken.
            scores: [L, K, T] float32 attention, not negative.
            budgets: [L, K] int64.
            protected: [T] bool.

        Returns:
            [L, K, T] bool.

        Raises:
            ValueError: if the output norms were not observed.
        """
        norms = prefill.geometry.grouped(prefill.seen(OutputNorms(self.order))).mean(2)
        free = (budgets - protected.sum())[..., None]
        n_first = (free * self.first_stage).long()
        first = rank_per_head(scores, protected) < n_first
        weighted = (scores + self.epsilon) * norms
        second = rank_per_head(weighted, protected | first) < free - n_first
        return protected | first | second
