"""Query-time views: which entries of a read-only snapshot one query reads while decoding. One method, one file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class View(Protocol):
    """One verb."""

    def select(self, query: Tensor, keys: Tensor, positions: Tensor, n_tokens: int) -> Tensor:
        """Choose entries of one kv head for the rest of one answer.

        Args:
            query: [G, D], the last query token's queries of the head's group, after RoPE.
            keys: [n, D] of the snapshot.
            positions: [n] int32.
            n_tokens: T of the context.

        Returns:
            [m] int64, ascending indices into keys.
        """
        ...
