"""raw16: entries as they are, in 16 bits.

No paper: the reference that other codecs are measured against. A float32 model's entries become float16 where they fit
its range, else bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from precis.codecs import Layout, Shape

_HALF_LIMIT = 6e4


@dataclass(frozen=True, slots=True)
class Raw16:
    """Two bytes per number."""

    name: str = "raw16"
    pre_rope: bool = False

    def shapes(self, layout: Layout) -> dict[str, Shape]:
        """Keys and values as raw 16-bit words, then one flag byte: 1 = bfloat16, 0 = float16."""
        entries = (layout.n_entries, layout.head_dim)
        return {"keys": (torch.int16, entries), "values": (torch.int16, entries), "bfloat16": (torch.uint8, (1,))}

    def encode(self, keys: Tensor, values: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Round to 16 bits, if they are not 16 bits already.

        Raises:
            ValueError: if an entry is not finite.
        """
        if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
            raise ValueError("an entry is not finite")
        fits = keys.numel() == 0 or float(max(keys.abs().max(), values.abs().max())) < _HALF_LIMIT
        half = keys.dtype == torch.float16 or (keys.dtype == torch.float32 and fits)
        dtype = torch.float16 if half else torch.bfloat16
        return {
            "keys": keys.to(dtype).view(torch.int16),
            "values": values.to(dtype).view(torch.int16),
            "bfloat16": torch.tensor([not half], dtype=torch.uint8),
        }

    def decode(self, parts: Mapping[str, Tensor], layout: Layout, keys: Tensor, values: Tensor) -> None:
        """The same numbers."""
        dtype = torch.bfloat16 if int(parts["bfloat16"][0]) else torch.float16
        keys[:], values[:] = parts["keys"].view(dtype), parts["values"].view(dtype)
