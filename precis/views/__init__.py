"""Query-time views: which entries of a read-only snapshot one query reads while decoding. One method, one file."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Index = tuple[Tensor, ...]


class View(Protocol):
    """Prepare once per snapshot, select per query or per token.

    Attributes:
        budget: entries per kv head, about.
        every_step: whether entries are chosen anew for every token of the answer, or once at the question's last token.
        dense_layers: first layers, which always read everything.
        n_sliding: most recent entries that make room for the answer's, one by one, and entries of the answer that are
            then read at most; 0 = they stay.
        index_size: what an index depends on besides the keys; equal views share it.
    """

    @property
    def budget(self) -> int: ...

    @property
    def every_step(self) -> bool: ...

    @property
    def dense_layers(self) -> int: ...

    @property
    def n_sliding(self) -> int: ...

    @property
    def index_size(self) -> int: ...

    def prepare(self, keys: Tensor, positions: Tensor) -> Index:
        """Summarise one kv head's keys [n, D] at `positions` [n]."""
        ...

    def select(self, query: Tensor, keys: Tensor, positions: Tensor, index: Index) -> Tensor:
        """Choose entries of one kv head.

        Args:
            query: [G, D], the present token's queries of the head's group, after RoPE.
            keys: [n, D] of the snapshot.
            positions: [n] int32.
            index: from `prepare`.

        Returns:
            [m] int64, ascending indices into keys.
        """
        ...
