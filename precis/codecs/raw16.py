"""raw16: entries as they are, in 16 bits.

No paper: the reference that other codecs are measured against. A float32 model's entries become float16 where they fit
its range, else bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from precis.codecs import Layout, Shape
from precis.quantize import from_words, to_words, word_shapes


@dataclass(frozen=True, slots=True)
class Raw16:
    """Two bytes per number."""

    name: str = "raw16"
    pre_rope: bool = False

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Keys and values as raw 16-bit words, then one flag byte: 1 = bfloat16, 0 = float16."""
        return word_shapes(layout.n_entries, layout.head_dim)

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Round to 16 bits, if they are not 16 bits already.

        Raises:
            ValueError: if an entry is not finite.
        """
        return to_words(keys, values)

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """The same numbers."""
        keys[:], values[:] = from_words(parts)
