"""FINCH: attention of a window, each row weighted by how many tokens it could have looked at.

Corallo and Papotti 2024, "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models",
arXiv:2408.00167.
Differs from the paper: the window is the end of the document, since no question is known yet (give the question as a
probe for the paper's setting), kept keys stay at their original positions, and the document is scored as one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.observations.window import WindowQueries, window_attention
from precis.scorers import Comparable, Kind, Needs, blank


@dataclass(frozen=True, slots=True)
class Finch:
    """Score a token by the window's mean attention in units of each row's uniform attention.

    Attributes:
        n_window: observed tokens.
    """

    n_window: int = 64
    comparable: Comparable = "layer"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset({WindowQueries(self.n_window)})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: queries [L, H, W, D] of the last W tokens.

        Returns:
            [L, K, T] float32; 0 inside the window.
        """
        scores = blank(prefill)
        for layer, weights in window_attention(prefill, self.n_window):
            n_seen = weights.shape[-1]
            visible = torch.arange(n_seen, prefill.n_tokens, device=weights.device)[:, None]
            scores[layer, :, :n_seen] = (weights * visible).mean((1, 2))
        return scores
