"""Scorers: how much each token matters to each kv head. One method, one file."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations import Observation

Comparable = Literal["head", "layer", "global"]
Kind = Literal["attention", "weighted", "other"]
Needs = frozenset[Observation]


class Scorer(Protocol):
    """One verb, and what it presupposes.

    Attributes:
        needs: observations that `score` reads.
        comparable: across what its scores may be compared: the tokens of one head, of a layer, or of all layers.
        kind: plain attention weights, attention already weighted with value norms, or something else.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def comparable(self) -> Comparable: ...

    @property
    def kind(self) -> Kind: ...

    def score(self, prefill: Prefill) -> Tensor:
        """Give [L, K, T] float32, higher = keep."""
        ...


def blank(prefill: Prefill) -> Tensor:
    """Zeros [L, K, T] float32."""
    g = prefill.geometry
    return torch.zeros(g.n_layers, g.n_kv_heads, prefill.n_tokens, device=prefill.keys.device)
