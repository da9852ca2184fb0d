"""int4: keys per channel before RoPE, values per token, groups of 64, 4 bits; sinks at 8 bits.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750.
Differs from the paper: keys are quantised before RoPE, 4 bits, the sinks are kept at 8 bits per token, since their
keys are outliers that would widen every group they are in, and no residual of recent tokens is kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from precis.codecs import Layout, Shape
from precis.quantize import (
    by_channel_groups,
    channel_group,
    check_encodable,
    decode_sinks,
    encode_sinks,
    pack4,
    quantize,
    sink_rows,
    sink_shapes,
    token_groups,
    unpack4,
)


@dataclass(frozen=True, slots=True)
class Int4:
    """About 4.5 bits per number. The head dim must be even."""

    name: str = "int4"
    pre_rope: bool = True

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Scales and minima first, then codes of sinks, then codes of the rest, two to a byte."""
        n, n_sink, d = layout.n_entries, sum(layout.sinks), layout.head_dim
        rest = _rest(layout)
        n_groups = sum((count + 63) // 64 for count in rest)
        per_token = d // channel_group(d)
        return {
            "key_scale": (torch.float16, (n_groups, d)),
            "key_low": (torch.float16, (n_groups, d)),
            "value_scale": (torch.float16, (n - n_sink, per_token)),
            "value_low": (torch.float16, (n - n_sink, per_token)),
            **sink_shapes(n_sink, d),
            "keys": (torch.uint8, (n - n_sink, d // 2)),
            "values": (torch.uint8, (n - n_sink, d // 2)),
        }

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Quantise the kept entries.

        Raises:
            ValueError: if an entry is not finite or beyond float16, or the head dim is odd.
        """
        if layout.head_dim % 2:
            raise ValueError(f"int4 needs an even head dim, not {layout.head_dim}: use the codec int8")
        keys, values = keys.float(), values.float()
        check_encodable(keys)
        check_encodable(values)
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        sinks = encode_sinks(keys[is_sink], values[is_sink])
        keys, values = keys[~is_sink], values[~is_sink]
        members, group = token_groups(_rest(layout), keys.device)
        codes, key_scale, key_low = quantize(keys[members], 4, 1)
        inside = torch.arange(keys.shape[0], device=keys.device) - members[group, 0]
        grouped = by_channel_groups(values)
        value_codes, value_scale, value_low = quantize(grouped, 4, 2)
        return {
            "key_scale": key_scale,
            "key_low": key_low,
            "value_scale": value_scale,
            "value_low": value_low,
            **sinks,
            "keys": pack4(codes[group, inside]),
            "values": pack4(value_codes.reshape(values.shape)),
        }

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Within half a step of each entry."""
        device = parts["keys"].device
        is_sink = sink_rows(layout.counts, layout.sinks, device)
        _, group = token_groups(_rest(layout), device)
        keys, values = torch.empty(2, layout.n_entries, layout.head_dim, device=device)
        keys[is_sink], values[is_sink] = decode_sinks(parts)
        keys[~is_sink] = (
            unpack4(parts["keys"]).float() * parts["key_scale"].float()[group] + parts["key_low"].float()[group]
        )
        codes = by_channel_groups(unpack4(parts["values"]).float())
        rest = codes * parts["value_scale"].float()[..., None] + parts["value_low"].float()[..., None]
        values[~is_sink] = rest.reshape(group.shape[0], layout.head_dim)
        return keys, values


def _rest(layout: Layout) -> tuple[int, ...]:
    """Entries per head that are no sinks."""
    return tuple(count - n_sink for count, n_sink in zip(layout.counts, layout.sinks, strict=True))
