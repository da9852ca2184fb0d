"""16-bit words, min-max quantisation of ragged groups, packing of codes, and Hadamard rotation.

The layout of KIVI (Liu et al. 2024, arXiv:2402.02750): keys per channel over groups of tokens, values per token over
groups of channels. Differs from the paper: a head's last, short group is quantised too, not kept in 16 bits. Codes
are computed from the float16-rounded scale and minimum, so that encoder and decoder agree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
GROUP = 64
_LIMIT = 6e4  # of float16, with room


def check_encodable(x: Tensor) -> None:
    """Refuse entries that min-max codes cannot carry.

    Raises:
        ValueError: if an entry is not finite or beyond float16.
    """
    if x.numel() and not bool((x.abs() < _LIMIT).all()):
        raise ValueError("an entry is not finite or beyond 60000: use the codec raw16")


def word_shapes(n: int, head_dim: int) -> Shapes:
    """Dtypes and shapes of `to_words` for keys and values [n, D]."""
    words = (torch.int16, (n, head_dim))
    return {"keys": words, "values": words, "bfloat16": (torch.uint8, (1,))}


def to_words(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Keys and values in 16 bits, rounded if need be: float32 to float16 where it fits its range.

    Raises:
        ValueError: if an entry is not finite.
    """
    if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
        raise ValueError("an entry is not finite")
    fits = keys.numel() == 0 or float(max(keys.abs().max(), values.abs().max())) < _LIMIT
    half = keys.dtype == torch.float16 or (keys.dtype == torch.float32 and fits)
    dtype = torch.float16 if half else torch.bfloat16
    words = {"keys": keys.to(dtype).view(torch.int16), "values": values.to(dtype).view(torch.int16)}
    return {**words, "bfloat16": torch.tensor([not half], dtype=torch.uint8)}


def from_words(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values in 16 bits."""
    dtype = torch.bfloat16 if int(parts["bfloat16"][0]) else torch.float16
    return parts["keys"].view(dtype), parts["values"].view(dtype)


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


def group_shapes(counts: tuple[int, ...], head_dim: int, n_bits: int, size: int = GROUP) -> tuple[Shapes, Shapes]:
    """Dtypes and shapes of `encode_groups`: of scales and minima, and of codes."""
    n, n_groups = sum(counts), sum(-(-count // size) for count in counts)
    of_key = (torch.float16, (n_groups, head_dim))
    of_value = (torch.float16, (n, head_dim // channel_group(head_dim, size)))
    codes = (torch.uint8, (n, packed_size(head_dim, n_bits)))
    scales: Shapes = {"key_scale": of_key, "key_low": of_key, "value_scale": of_value, "value_low": of_value}
    return scales, {"keys": codes, "values": codes}


def encode_groups(
    keys: Tensor, values: Tensor, counts: tuple[int, ...], n_bits: int, size: int = GROUP
) -> dict[str, Tensor]:
    """Parts of float32 keys and values [n, D]: keys per channel, values per token."""
    members, group = token_groups(counts, keys.device, size)
    codes, key_scale, key_low = quantize(keys[members], n_bits, 1)
    inside = torch.arange(keys.shape[0], device=keys.device) - members[group, 0]
    value_codes, value_scale, value_low = quantize(by_channel_groups(values, size), n_bits, 2)
    return {
        "key_scale": key_scale,
        "key_low": key_low,
        "value_scale": value_scale,
        "value_low": value_low,
        "keys": pack(codes[group, inside], n_bits),
        "values": pack(value_codes.reshape(values.shape), n_bits),
    }


def decode_groups(
    parts: Mapping[str, Tensor], counts: tuple[int, ...], head_dim: int, n_bits: int, size: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Keys and values [n, D], within half a step."""
    _, group = token_groups(counts, parts["keys"].device, size)
    codes = unpack(parts["keys"], n_bits, head_dim).float()
    keys = codes * parts["key_scale"].float()[group] + parts["key_low"].float()[group]
    codes = by_channel_groups(unpack(parts["values"], n_bits, head_dim).float(), size)
    values = codes * parts["value_scale"].float()[..., None] + parts["value_low"].float()[..., None]
    return keys, values.reshape(keys.shape)


def encode_sinks(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Parts of sinks [n, D] at 8 bits per token: their keys are outliers, which would widen every group they are in."""
    codes, scale, low = quantize(torch.stack([keys, values]), 8, 2)
    return {"sink_scale": scale, "sink_low": low, "sinks": codes}


def sink_shapes(n: int, head_dim: int) -> Shapes:
    """Dtype and shape of these parts."""
    per_token = (torch.float16, (2, n))
    return {"sink_scale": per_token, "sink_low": per_token, "sinks": (torch.uint8, (2, n, head_dim))}


def decode_sinks(parts: Mapping[str, Tensor]) -> Tensor:
    """Keys and values [2, n, D] of sinks."""
    return parts["sinks"].float() * parts["sink_scale"].float()[..., None] + parts["sink_low"].float()[..., None]


def channel_group(head_dim: int, limit: int = GROUP) -> int:
    """Channels per group of a value: `limit` where it divides the head dim, else the largest divisor below."""
    return next(size for size in range(min(limit, head_dim), 0, -1) if head_dim % size == 0)


def by_channel_groups(values: Tensor, limit: int = GROUP) -> Tensor:
    """[n, D] -> [n, groups, channels per group]; n may be 0."""
    size = channel_group(values.shape[1], limit)
    return values.reshape(values.shape[0], values.shape[1] // size, size)


def token_groups(counts: tuple[int, ...], device: torch.device, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """Cut each head's tokens into groups.

    Args:
        counts: tokens per head, heads stored one after the other.
        device: of the result.
        size: tokens of a group.

    Returns:
        members [groups, size] int64, indices of tokens, a short group's last token repeated; group [tokens] int64.
    """
    per_head = torch.tensor(counts, dtype=torch.int64)
    starts = torch.cumsum(per_head, 0) - per_head
    n_groups = (per_head + size - 1) // size
    head = torch.repeat_interleave(torch.arange(len(counts)), n_groups)
    inside = torch.arange(int(n_groups.sum())) - torch.repeat_interleave(torch.cumsum(n_groups, 0) - n_groups, n_groups)
    first = starts[head] + inside * size
    last = starts[head] + per_head[head] - 1
    members = torch.minimum(first[:, None] + torch.arange(size)[None], last[:, None])
    lengths = torch.minimum(last - first + 1, torch.full_like(first, size))
    group = torch.repeat_interleave(torch.arange(first.shape[0]), lengths)
    return members.to(device), group.to(device)


def packed_size(n: int, n_bits: int) -> int:
    """Bytes of n codes."""
    return -(-n * n_bits // 8)


def pack(codes: Tensor, n_bits: int) -> Tensor:
    """Codes [n, D] below 2^n_bits -> uint8 [n, packed_size(D)]; the first channel in the lowest bits."""
    if n_bits == 8:
        return codes
    if 8 % n_bits == 0:
        per_byte = 8 // n_bits
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
        padded = padded.reshape(len(codes), packed_size(codes.shape[1], n_bits), per_byte)
        found = padded[..., 0].clone()
        for i in range(1, per_byte):
            found |= padded[..., i] << (n_bits * i)
        return found
    bits = (codes[..., None] >> torch.arange(n_bits, device=codes.device, dtype=torch.uint8)) & 1
    return pack(bits.flatten(1), 1)


def unpack(packed: Tensor, n_bits: int, n: int) -> Tensor:
    """The inverse of `pack`: uint8 [., n]."""
    if n_bits == 8:
        return packed
    if 8 % n_bits == 0:
        parts = [(packed >> shift) & (2**n_bits - 1) for shift in range(0, 8, n_bits)]
        return torch.stack(parts, -1).flatten(1)[:, :n]
    bits = unpack(packed, 1, n * n_bits).reshape(len(packed), n, n_bits)
    return (bits << torch.arange(n_bits, device=packed.device, dtype=torch.uint8)).sum(-1).to(torch.uint8)


def rotate(x: Tensor) -> Tensor:
    """[n, D] float32 times Hadamard matrices of the largest power of two that divides D; its own inverse."""
    size = x.shape[1] & -x.shape[1]
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = x.reshape(len(x), x.shape[1] // size, size)
    found: Tensor = blocks @ (matrix / size**0.5).to(x.device)
    return found.reshape(x.shape)


def sink_rows(counts: tuple[int, ...], sinks: tuple[int, ...], device: torch.device, window: int = 0) -> Tensor:
    """[n] bool: which entries are sinks, the first of each head, or among the last `window` of their head."""
    flags = [torch.arange(n) for n in counts]
    edges = [(at < n_sink) | (at >= len(at) - window) for at, n_sink in zip(flags, sinks, strict=True)]
    return torch.cat(edges).to(device) if edges else torch.zeros(0, dtype=torch.bool, device=device)
