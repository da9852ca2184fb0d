"""TOVA: keep what the last token looks at, the same for all heads of a layer.

Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv:2401.06104.
Differs from the paper: applied once after prefill instead of at every decoding step. As in kvpress' TOVAPress.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class Tova:
    """Score a token by the last token's attention, averaged over all heads of the layer."""

    comparable: Comparable = "layer"
    kind: Kind = "attention"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(1)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: the last token's queries [L, H, 1, D].

        Returns:
            [L, K, T] float32, equal for all kv heads of a layer; 0 for the last token.
        """
        scores = blank(prefill)
        for layer, weights in window_attention(prefill, 1):
            scores[layer, :, :-1] = weights[:, :, 0].mean((0, 1))
        return scores
