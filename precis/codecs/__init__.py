"""Codecs: how the kept entries of one layer become few bytes, and back. One codec, one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a layer before its bytes are read, and what the sizes of all parts follow from.

    Attributes:
        counts: per kv head, kept entries.
        sinks: per kv head, how many of the first kept entries are sinks.
        head_dim: D.
    """

    counts: tuple[int, ...]
    sinks: tuple[int, ...]
    head_dim: int

    @property
    def n_entries(self) -> int:
        """Entries of the layer."""
        return sum(self.counts)


class Codec(Protocol):
    """A pair of inverse verbs.

    Attributes:
        name: stored in the container.
        pre_rope: whether keys come before RoPE.
    """

    @property
    def name(self) -> str: ...

    @property
    def pre_rope(self) -> bool: ...

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Dtype and shape of every part, in the order in which they are stored."""
        ...

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Entries [n, D] of one layer -> parts as in `shapes`.

        Raises:
            ValueError: if an entry is not finite, or too large for the codec.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Parts -> keys and values [n, D] in a floating dtype."""
        ...
