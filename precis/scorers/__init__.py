"""Scorers: how much each token matters to each kv head. One method, one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from precis.core import Prefill

Comparable = Literal["head", "layer", "global"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What has to be observed during prefill.

    Attributes:
        n_window: last tokens whose queries are kept (W).
        repeat: whether the context is repeated once, and the attention that pays recorded.
        output_norms: whether ||v W_o||_1 is computed.
    """

    n_window: int = 0
    repeat: bool = False
    output_norms: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.n_window, other.n_window), self.repeat or other.repeat, self.output_norms or other.output_norms
        )


class Scorer(Protocol):
    """One verb, and what it presupposes.

    Attributes:
        needs: observations that `score` reads.
        comparable: across what its scores may be compared: the tokens of one head, of a layer, or of all layers.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def comparable(self) -> Comparable: ...

    def score(self, prefill: Prefill) -> Tensor:
        """Give [L, K, T] float32, higher = keep."""
        ...
