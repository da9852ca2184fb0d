"""int4, int3, int2: keys per channel before RoPE, values per token, in groups of 64 or 32; sinks at 8 bits.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750.
Differs from the paper: keys are quantised before RoPE, the sinks are kept at 8 bits per token, since their keys are
outliers that would widen every group they are in, and no residual of recent tokens is kept in 16 bits. `int4-hadamard`
rotates keys and values by a Hadamard matrix first, which spreads outlying channels (Ashkboos et al. 2024, "QuaRot",
arXiv:2404.00456).
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
    pack,
    packed_size,
    quantize,
    rotate,
    sink_rows,
    sink_shapes,
    token_groups,
    unpack,
)


@dataclass(frozen=True, slots=True)
class Kivi:
    """Half a bit more per number than its codes with groups of 64, one more with groups of 32.

    Attributes:
        n_bits: of a code.
        group: tokens of a key's group, and at most so many channels of a value's.
        rotated: whether heads are rotated by a Hadamard matrix.
    """

    name: str
    n_bits: int
    group: int = 64
    rotated: bool = False
    pre_rope: bool = True

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Scales and minima first, then codes of sinks, then codes of the rest, packed."""
        n, n_sink, d = layout.n_entries, sum(layout.sinks), layout.head_dim
        n_groups = sum(-(-count // self.group) for count in _rest(layout))
        per_token = d // channel_group(d, self.group)
        size = packed_size(d, self.n_bits)
        return {
            "key_scale": (torch.float16, (n_groups, d)),
            "key_low": (torch.float16, (n_groups, d)),
            "value_scale": (torch.float16, (n - n_sink, per_token)),
            "value_low": (torch.float16, (n - n_sink, per_token)),
            **sink_shapes(n_sink, d),
            "keys": (torch.uint8, (n - n_sink, size)),
            "values": (torch.uint8, (n - n_sink, size)),
        }

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Quantise the kept entries.

        Raises:
            ValueError: if an entry is not finite or beyond float16.
        """
        keys, values = keys.float(), values.float()
        check_encodable(keys)
        check_encodable(values)
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device)
        sinks = encode_sinks(keys[is_sink], values[is_sink])
        keys, values = keys[~is_sink], values[~is_sink]
        if self.rotated:
            keys, values = rotate(keys), rotate(values)
        members, group = token_groups(_rest(layout), keys.device, self.group)
        codes, key_scale, key_low = quantize(keys[members], self.n_bits, 1)
        inside = torch.arange(keys.shape[0], device=keys.device) - members[group, 0]
        value_codes, value_scale, value_low = quantize(by_channel_groups(values, self.group), self.n_bits, 2)
        return {
            "key_scale": key_scale,
            "key_low": key_low,
            "value_scale": value_scale,
            "value_low": value_low,
            **sinks,
            "keys": pack(codes[group, inside], self.n_bits),
            "values": pack(value_codes.reshape(values.shape), self.n_bits),
        }

    def decode(self, parts: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
        """Within half a step of each entry, or, rotated, of each channel of the rotated one."""
        device, d = parts["keys"].device, layout.head_dim
        is_sink = sink_rows(layout.counts, layout.sinks, device)
        _, group = token_groups(_rest(layout), device, self.group)
        keys, values = torch.empty(2, layout.n_entries, d, device=device)
        keys[is_sink], values[is_sink] = decode_sinks(parts)
        codes = unpack(parts["keys"], self.n_bits, d).float()
        key = codes * parts["key_scale"].float()[group] + parts["key_low"].float()[group]
        codes = by_channel_groups(unpack(parts["values"], self.n_bits, d).float(), self.group)
        value = codes * parts["value_scale"].float()[..., None] + parts["value_low"].float()[..., None]
        value = value.reshape(group.shape[0], d)
        keys[~is_sink], values[~is_sink] = (rotate(key), rotate(value)) if self.rotated else (key, value)
        return keys, values


def _rest(layout: Layout) -> tuple[int, ...]:
    """Entries per head that are no sinks."""
    return tuple(count - n_sink for count, n_sink in zip(layout.counts, layout.sinks, strict=True))
