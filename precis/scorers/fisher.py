"""Fisher: keep the values whose loss would change the model's predictions most while it repeats the document.

No paper. To second order, replacing a value v by the mean value m changes the predictions by about |v - m|^2 times the
value's Fisher information. That is blind where the model is sure of what it copies, since the gradient vanishes there;
KVzip's attention A is not. With `attention`, both are mixed by a geometric mean, in which the Fisher part F counts by
its square root, as attention does, and cannot fall below a share of A^2: sqrt(A sqrt(F + floor A^2)), each part in
units of the mean of its best tenth. kvpress' KVGradPress is a relative: it weights repeat attention with output norms
and with the gradient of the hidden state's norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.fisher import RepeatGradients
from precis.scorers import Comparable, Kind, Needs

_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Fisher:
    """Score a token by its value's Fisher information times its squared distance from the head's mean value.

    Attributes:
        attention: whether KVzip's score takes part.
        floor: share of squared attention below which the Fisher part does not fall.
    """

    attention: bool = False
    floor: float = 0.1
    comparable: Comparable = "global"
    kind: Kind = "weighted"

    @property
    def needs(self) -> Needs:
        return frozenset({RepeatGradients()})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: repeat gradients [L, H + 2 K, T].

        Returns:
            [L, K, T] float32, comparable across heads and layers; 0 outside of the document's body.
        """
        g, found = prefill.geometry, prefill.seen(RepeatGradients())
        distances = []
        for values in prefill.values:
            centred = values.float() - values.float().mean(1, keepdim=True)
            distances.append(centred.square().sum(-1))
        damage = found[:, g.n_heads : g.n_heads + g.n_kv_heads] * torch.stack(distances)
        if not self.attention:
            return damage
        attention, damage = _scaled(g.grouped(found[:, : g.n_heads]).amax(2)), _scaled(damage)
        return (attention * (damage + self.floor * attention.square()).sqrt()).sqrt()


def _scaled(part: Tensor) -> Tensor:
    """In units of the mean of its best tenth."""
    best = part.flatten().topk(max(1, part.numel() // 10)).values
    return part / best.mean().clamp_min(_TINY)
