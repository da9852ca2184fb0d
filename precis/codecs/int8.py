"""int8: keys per channel before RoPE, values per token, groups of 64, 8 bits.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750.
Differs from the paper: keys are quantised before RoPE, 8 bits, and no residual of recent tokens is kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from precis.codecs import Layout, Shape
from precis.quantize import check_encodable, decode_groups, encode_groups, group_shapes


@dataclass(frozen=True, slots=True)
class Int8:
    """About 8.5 bits per number."""

    name: str = "int8"
    pre_rope: bool = True

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Scales and minima first, then codes."""
        scales, codes = group_shapes(layout.counts, layout.head_dim, 8)
        return {**scales, **codes}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Quantise the kept entries.

        Raises:
            ValueError: if an entry is not finite or beyond float16.
        """
        keys, values = keys.float(), values.float()
        check_encodable(keys)
        check_encodable(values)
        return encode_groups(keys, values, layout.counts, 8)

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """Within half a step of each entry."""
        keys[:], values[:] = decode_groups(parts, layout.counts, layout.head_dim, 8)
