"""Fisher: keep the values whose loss would change the model's predictions most while it repeats the document.

Not from a paper. To second order, replacing a value v by the mean value m changes the predictions by about
|v - m|^2 times the value's Fisher information. kvpress' KVGradPress is a relative: it weights repeat attention with
output norms and with the gradient of the hidden state's norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.fisher import ValueFisher
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Fisher:
    """Score a token by its value's Fisher information times its squared distance from the head's mean value."""

    comparable: Comparable = "global"
    kind: Kind = "weighted"

    @property
    def needs(self) -> Needs:
        return frozenset({ValueFisher()})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: value Fisher [L, K, T].

        Returns:
            [L, K, T] float32, comparable across heads and layers; 0 outside of the document's body.
        """
        distances = []
        for values in prefill.values:
            centred = values.float() - values.float().mean(1, keepdim=True)
            distances.append(centred.square().sum(-1))
        return prefill.seen(ValueFisher()) * torch.stack(distances)
