"""int8: keys per channel before RoPE, values per token, groups of 64, 8 bits.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750.
Differs from the paper: keys are quantised before RoPE, 8 bits, and no residual of recent tokens is kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from precis.codecs import Layout, Shape
from precis.quantize import by_channel_groups, channel_group, check_encodable, quantize, token_groups


@dataclass(frozen=True, slots=True)
class Int8:
    """About 8.5 bits per number."""

    name: str = "int8"
    pre_rope: bool = True

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Scales and minima first, then codes."""
        n, d = layout.n_entries, layout.head_dim
        n_groups = sum((count + 63) // 64 for count in layout.counts)
        per_token = d // channel_group(d)
        return {
            "key_scale": (torch.float16, (n_groups, d)),
            "key_low": (torch.float16, (n_groups, d)),
            "value_scale": (torch.float16, (n, per_token)),
            "value_low": (torch.float16, (n, per_token)),
            "keys": (torch.uint8, (n, d)),
            "values": (torch.uint8, (n, d)),
        }

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Quantise the kept entries.

        Raises:
            ValueError: if an entry is not finite or beyond float16.
        """
        keys, values = keys.float(), values.float()
        check_encodable(keys)
        check_encodable(values)
        members, group = token_groups(layout.counts, keys.device)
        codes, key_scale, key_low = quantize(keys[members], 8, 1)
        inside = torch.arange(keys.shape[0], device=keys.device) - members[group, 0]
        grouped = by_channel_groups(values)
        value_codes, value_scale, value_low = quantize(grouped, 8, 2)
        return {
            "key_scale": key_scale,
            "key_low": key_low,
            "value_scale": value_scale,
            "value_low": value_low,
            "keys": codes[group, inside],
            "values": value_codes.reshape(values.shape),
        }

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Within half a step of each entry."""
        _, group = token_groups(layout.counts, parts["keys"].device)
        keys = parts["keys"].float() * parts["key_scale"].float()[group] + parts["key_low"].float()[group]
        codes = by_channel_groups(parts["values"].float())
        values = codes * parts["value_scale"].float()[..., None] + parts["value_low"].float()[..., None]
        return keys, values.reshape(parts["values"].shape)
