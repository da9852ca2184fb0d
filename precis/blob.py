"""One blob of a snapshot: the kept entries of a block of layers, coded, and back.

    blob = a mode byte per head, the heads' positions (precis.positions), zeros up to a multiple of 16, then the codec's
        parts in the order of `Codec.shapes`, each row-major and padded with zeros to a multiple of 16 bytes; a part
        whose length is not known beforehand comes after its length in 16 bytes; then, where entries were merged
        (`biased`), a float16 bias per entry, padded likewise

Heads are those of the block's first layer, then of its second, and so on. Every length follows from the counts, the
mode bytes, the codec and the lengths inside; a blob with another length is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from precis import positions as position_codes
from precis.codecs import VARIABLE, Codec, Layout, Shape, unraveled
from precis.positions import Positions

ALIGN = 16


@dataclass(frozen=True, slots=True)
class Block:
    """The kept entries of some layers.

    Attributes:
        heads: per layer and kv head, positions of its entries.
        keys: [n, D] of all heads, before RoPE if the codec works there.
        values: [n, D].
        bias: [n] float32, or None.
    """

    heads: Sequence[Positions]
    keys: Tensor
    values: Tensor
    bias: Tensor | None = None


def layout_of(heads: Sequence[Positions], n_sink: int, head_dim: int, index: int) -> Layout:
    """What a codec is told of the block with this index."""
    return Layout(tuple(map(len, heads)), count_sinks(heads, n_sink), head_dim, index, tuple(heads))


def write(block: Block, index: int, codec: Codec, n_tokens: int, n_sink: int) -> bytes:
    """The blob of a block.

    Args:
        block: whose entries.
        index: of the block among the snapshot's.
        codec: tuned to the snapshot.
        n_tokens: of the context.
        n_sink: first tokens that are sinks.

    Raises:
        ValueError: if the codec cannot carry an entry.
    """
    coded = [position_codes.encode(head, n_tokens) for head in block.heads]
    layout = layout_of(block.heads, n_sink, block.keys.shape[1], index)
    parts = codec.encode(block.keys, block.values, layout)
    pieces = [padded(bytes(mode for mode, _ in coded) + b"".join(data for _, data in coded))]
    for name, (_, sizes) in codec.shapes(layout).items():
        if sizes == VARIABLE:
            pieces.append(padded(parts[name].numel().to_bytes(8, "little")))
        pieces.append(padded(_to_bytes(parts[name])))
    if block.bias is not None:
        pieces.append(padded(_to_bytes(block.bias.to(torch.float16))))
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A blob that was checked and taken apart.

    Attributes:
        layout: of its block.
        parts: as the codec's `decode` takes them.
        bias: [n] float32, or None.
    """

    layout: Layout
    parts: Mapping[str, Tensor]
    bias: Tensor | None


def read(  # noqa: PLR0913 — what a manifest says of a block
    blob: bytes,
    counts: Sequence[int],
    index: int,
    codec: Codec,
    n_tokens: int,
    n_sink: int,
    head_dim: int,
    *,
    biased: bool,
    device: torch.device,
) -> Opened:
    """All of the inverse of `write` but for the codec's `decode`, checking every claim.

    Raises:
        ValueError: if a byte cannot be right.
    """
    at, heads = len(counts), []
    for mode, count in zip(blob[: len(counts)], counts, strict=True):
        length = position_codes.size(mode, count, n_tokens)
        heads.append(position_codes.decode(mode, blob[at : at + length], count, n_tokens))
        at += length
    layout = layout_of(heads, n_sink, head_dim, index)
    parts = {}
    at += -at % ALIGN
    for name, (dtype, known) in codec.shapes(layout).items():
        sizes = known
        if known == VARIABLE:
            length_part, at = _read_part(blob, at, (torch.int64, (1,)), torch.device("cpu"))
            sizes = (int(length_part),)
        parts[name], at = _read_part(blob, at, (dtype, sizes), device)
    bias = None
    if biased:
        half, at = _read_part(blob, at, (torch.float16, (sum(counts),)), device)
        bias = half.float()
        if not bool(torch.isfinite(bias).all()):
            raise ValueError("a bias is not a number")
    if at != len(blob):
        raise ValueError(f"{len(blob)} bytes where {at} were expected")
    return Opened(layout, unraveled(codec, parts, layout), bias)


def _read_part(blob: bytes, at: int, shape: Shape, device: torch.device) -> tuple[Tensor, int]:
    dtype, sizes = shape
    n_bytes = prod(sizes) * dtype.itemsize
    if min(sizes) < 0 or at + n_bytes > len(blob):
        raise ValueError("the blob ends early")
    if n_bytes == 0:
        return torch.empty(sizes, dtype=dtype, device=device), at
    raw = np.frombuffer(blob, np.uint8, n_bytes, at).copy()
    return torch.from_numpy(raw).view(dtype).reshape(sizes).to(device), at + n_bytes + -n_bytes % ALIGN


def count_sinks(heads: Iterable[Positions], n_sink: int) -> tuple[int, ...]:
    """Per head, how many of its kept entries are among the first `n_sink` tokens."""
    return tuple(int(np.searchsorted(head, n_sink)) for head in heads)


def padded(data: bytes) -> bytes:
    """With zeros up to a multiple of 16 bytes."""
    return data + bytes(-len(data) % ALIGN)


def _to_bytes(part: Tensor) -> bytes:
    if part.numel() == 0:
        return b""
    return part.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
