"""Min-max quantisation of ragged groups, and packing of 4-bit codes.

The layout of KIVI (Liu et al. 2024, arXiv:2402.02750): keys per channel over groups of tokens, values per token over
groups of channels. Differs from the paper: a head's last, short group is quantised too, not kept in 16 bits. Codes
are computed from the float16-rounded scale and minimum, so that encoder and decoder agree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GROUP = 64
_LIMIT = 6e4  # of float16, with room


def check_encodable(x: Tensor) -> None:
    """Refuse entries that min-max codes cannot carry.

    Raises:
        ValueError: if an entry is not finite or beyond float16.
    """
    if x.numel() and not bool((x.abs() < _LIMIT).all()):
        raise ValueError("an entry is not finite or beyond 60000: use the codec raw16")


def quantize(x: Tensor, n_bits: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Min-max codes of groups.

    Args:
        x: float32; a group runs along `axis`.
        n_bits: at most 8.
        axis: the grouped axis.

    Returns:
        codes uint8 like x; scale and minimum, float16, with `axis` removed.
    """
    low = x.amin(axis).half()
    steps = 2**n_bits - 1
    scale = ((x.amax(axis) - low.float()) / steps).half()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # constant group, or a step below float16
    codes = ((x - low.float().unsqueeze(axis)) / scale.float().unsqueeze(axis)).round_().clamp_(0, steps)
    return codes.to(torch.uint8), scale, low


def encode_sinks(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Parts of sinks [n, D] at 8 bits per token: their keys are outliers, which would widen every group they are in."""
    codes, scale, low = quantize(torch.stack([keys, values]), 8, 2)
    return {"sink_scale": scale, "sink_low": low, "sinks": codes}


def sink_shapes(n: int, head_dim: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of these parts."""
    per_token = (torch.float16, (2, n))
    return {"sink_scale": per_token, "sink_low": per_token, "sinks": (torch.uint8, (2, n, head_dim))}


def decode_sinks(parts: Mapping[str, Tensor]) -> Tensor:
    """Keys and values [2, n, D] of sinks."""
    return parts["sinks"].float() * parts["sink_scale"].float()[..., None] + parts["sink_low"].float()[..., None]


def channel_group(head_dim: int) -> int:
    """Channels per group of a value: 64 where it divides the head dim, else the largest divisor below."""
    return next(size for size in range(min(GROUP, head_dim), 0, -1) if head_dim % size == 0)


def by_channel_groups(values: Tensor) -> Tensor:
    """[n, D] -> [n, groups, channels per group]; n may be 0."""
    size = channel_group(values.shape[1])
    return values.reshape(values.shape[0], values.shape[1] // size, size)


def token_groups(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut each head's tokens into groups of 64.

    Args:
        counts: tokens per head, heads stored one after the other.
        device: of the result.

    Returns:
        members [groups, 64] int64, indices of tokens, a short group's last token repeated; group [tokens] int64.
    """
    per_head = torch.tensor(counts, dtype=torch.int64)
    starts = torch.cumsum(per_head, 0) - per_head
    n_groups = (per_head + GROUP - 1) // GROUP
    head = torch.repeat_interleave(torch.arange(len(counts)), n_groups)
    inside = torch.arange(int(n_groups.sum())) - torch.repeat_interleave(torch.cumsum(n_groups, 0) - n_groups, n_groups)
    first = starts[head] + inside * GROUP
    last = starts[head] + per_head[head] - 1
    members = torch.minimum(first[:, None] + torch.arange(GROUP)[None], last[:, None])
    sizes = torch.minimum(last - first + 1, torch.full_like(first, GROUP))
    group = torch.repeat_interleave(torch.arange(first.shape[0]), sizes)
    return members.to(device), group.to(device)


def pack4(codes: Tensor) -> Tensor:
    """Codes 0..15 [n, D], D even -> uint8 [n, D/2], even channel in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack4(packed: Tensor) -> Tensor:
    """The inverse of `pack4`."""
    return torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], 2 * packed.shape[1])


def sink_rows(counts: tuple[int, ...], sinks: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] bool: which entries are sinks, the first of each head."""
    flags = [torch.arange(count) < n_sink for count, n_sink in zip(counts, sinks, strict=True)]
    return torch.cat(flags).to(device) if flags else torch.zeros(0, dtype=torch.bool, device=device)
