"""KVzip: keep what the model reads when it repeats the document.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", arXiv:2505.23416.
Differs from the paper: the instruction to repeat is a turn of its own after the document's turn (the prompt seam), the
repeated chunk shrinks where the model's length leaves no room for 2,048 tokens, and layers with a full sliding window
are left alone. On equal token sequences the scores equal kvpress' KVzipPress.
KVzip+ (Jegou and Jeblick 2026, "KVzap", arXiv:2601.07891) weights each attention with ||W_o v||_2 and divides it by the
norm of the reading token's hidden state; as in kvpress that state is the attention's input, after normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precis.core import Prefill
from precis.observations.norms import OutputNorms
from precis.observations.repeat import CHUNK, RepeatAttention
from precis.scorers import Comparable, Kind, Needs


@dataclass(frozen=True, slots=True)
class KVzip:
    """Score a token by the largest attention that any row and any query head of its group paid while repeating.

    Attributes:
        plus: weight with output norms and divide by the row's norm (KVzip+).
        chunk: tokens repeated at a time.
    """

    plus: bool = False
    chunk: int = CHUNK
    comparable: Comparable = "global"

    @property
    def kind(self) -> Kind:
        return "weighted" if self.plus else "attention"

    @property
    def needs(self) -> Needs:
        repeat = RepeatAttention(per_residual=self.plus, chunk=self.chunk)
        return frozenset({repeat, OutputNorms(2)} if self.plus else {repeat})

    def score(self, prefill: Prefill) -> Tensor:
        """Rank every context token for every kv head.

        Args:
            prefill: repeat attention [L, H + K, T], and for KVzip+ output norms [L, H, T].

        Returns:
            [L, K, T] float32, comparable across heads and layers; 0 outside of the document's body.

        Raises:
            ValueError: if the context was not repeated.
        """
        g = prefill.geometry
        scores = prefill.seen(RepeatAttention(per_residual=self.plus, chunk=self.chunk))[:, : g.n_heads]
        if self.plus:
            scores = scores * prefill.seen(OutputNorms(2))
        return g.grouped(scores).amax(2)
