"""Trims: what an answer forgets of itself while it grows. One method, one file.

Only the answer's own entries are ever dropped: the question stays, and the snapshot is shared with others.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Trim(Protocol):
    """Look every few tokens, and say which entries of the answer stay.

    Attributes:
        every: tokens of the answer between two looks.
        n_window: last queries that it reads.
    """

    @property
    def every(self) -> int: ...

    @property
    def n_window(self) -> int: ...

    def keep(self, weights: Tensor, rows: Tensor, keys: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Choose entries of one kv head.

        Args:
            weights: [G, w, m] attention that the last w <= `n_window` tokens paid to the m entries, of a softmax over
                everything they saw.
            rows: [w] positions of those tokens.
            keys: [m, D] after RoPE, oldest first.
            memory: [m] float32 from the look before, 0 for entries that are new.

        Returns:
            [m] bool, True = keep, and the memory [m] for the next look.
        """
        ...
