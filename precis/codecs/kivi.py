"""int4, int3, int2: keys per channel before RoPE, values per token, in groups of 64 or 32; sinks at 8 bits.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750.
Differs from the paper: keys are quantised before RoPE, the sinks are kept at 8 bits per token, since their keys are
outliers that would widen every group they are in, and the last tokens are treated like the others, or, with `window`,
like sinks, where the paper keeps them in 16 bits. `int4-hadamard` rotates keys and values by a Hadamard matrix first,
which spreads outlying channels (Ashkboos et al. 2024, "QuaRot", arXiv:2404.00456). `minikv` is the quantiser of Sharma
et al. 2024, "MiniKV: Pushing the Limits of LLM Inference via 2-Bit Layer-Discriminative KV Cache", arXiv:2411.18077:
2 bits, groups of 16, the last 128 tokens apart; its choice of tokens is the policy of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from precis.codecs import Layout, Shape
from precis.quantize import (
    check_encodable,
    decode_groups,
    decode_sinks,
    encode_groups,
    encode_sinks,
    group_shapes,
    rotate,
    sink_rows,
    sink_shapes,
)


@dataclass(frozen=True, slots=True)
class Kivi:
    """Half a bit more per number than its codes with groups of 64, one more with groups of 32.

    Attributes:
        n_bits: of a code.
        group: tokens of a key's group, and at most so many channels of a value's.
        rotated: whether heads are rotated by a Hadamard matrix.
        window: last entries of each head that are kept at 8 bits, as sinks are.
    """

    name: str
    n_bits: int
    group: int = 64
    rotated: bool = False
    window: int = 0
    pre_rope: bool = True

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Scales and minima first, then codes of sinks, then codes of the rest, packed."""
        rest = self._rest(layout)
        scales, codes = group_shapes(rest, layout.head_dim, self.n_bits, self.group)
        return {**scales, **sink_shapes(layout.n_entries - sum(rest), layout.head_dim), **codes}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Quantise the kept entries.

        Raises:
            ValueError: if an entry is not finite or beyond float16.
        """
        keys, values = keys.float(), values.float()
        check_encodable(keys)
        check_encodable(values)
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device, self.window)
        sinks = encode_sinks(keys[is_sink], values[is_sink])
        keys, values = keys[~is_sink], values[~is_sink]
        if self.rotated:
            keys, values = rotate(keys), rotate(values)
        return {**sinks, **encode_groups(keys, values, self._rest(layout), self.n_bits, self.group)}

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """Within half a step of each entry, or, rotated, of each channel of the rotated one."""
        is_sink = sink_rows(layout.counts, layout.sinks, keys.device, self.window)
        keys[is_sink], values[is_sink] = decode_sinks(parts).to(keys.dtype)
        found = decode_groups(parts, self._rest(layout), layout.head_dim, self.n_bits, self.group)
        if self.rotated:
            found = rotate(found[0]), rotate(found[1])
        keys[~is_sink], values[~is_sink] = found[0].to(keys.dtype), found[1].to(keys.dtype)

    def _rest(self, layout: Layout) -> tuple[int, ...]:
        """Entries per head that are quantised in groups."""
        counted = zip(layout.counts, layout.sinks, strict=True)
        return tuple(max(0, count - n_sink - self.window) for count, n_sink in counted)
