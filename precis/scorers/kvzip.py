"""KVzip: keep what the model reads when it repeats the document.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", arXiv:2505.23416.
Differs from the paper: the instruction to repeat is a turn of its own after the document's turn (the prompt seam), the
repeated chunk shrinks where the model's length leaves no room for 2,048 tokens, and layers with a full sliding window
are left alone. The pass itself is `precis.prefill.repeat_context`; on equal token sequences it equals kvpress.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.scorers import Comparable, Needs


@dataclass(frozen=True, slots=True)
class KVzip:
    """Score a token by the largest attention that any row and any query head of its group paid while repeating."""

    comparable: Comparable = "global"

    @property
    def needs(self) -> Needs:
        return Needs(repeat=True)

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: repeat_attention [L, K, T].

        Returns:
            [L, K, T] float32 probabilities, comparable across heads and layers.

        Raises:
            ValueError: if the context was not repeated.
        """
        if prefill.repeat_attention is None:
            raise ValueError("KVzip needs the repeat pass")
        return prefill.repeat_attention
