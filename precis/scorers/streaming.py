"""StreamingLLM: keep the first tokens and the last ones.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453.
Differs from the paper: kept keys stay rotated at their original positions, since the whole context was within the
model's length; the sinks are kept by the policy's protection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class Streaming:
    """Score a token by how late it comes."""

    comparable: Comparable = "global"
    kind: Kind = "other"

    @property
    def needs(self) -> Needs:
        return frozenset()

    def score(self, prefill: Prefill) -> Tensor:
        """Rank tokens by recency.

        Args:
            prefill: only its shape is read.

        Returns:
            [L, K, T] float32: the position.
        """
        n_layers, n_kv_heads, n_tokens, _ = prefill.keys.shape
        positions = torch.arange(n_tokens, dtype=torch.float32, device=prefill.keys.device)
        return positions.expand(n_layers, n_kv_heads, n_tokens)
