"""The step of the transform codec that makes a snapshot as large as it may be, and the classes of its tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from precis.blob import layout_of
from precis.codecs.tc import TransformCodec
from precis.coefficients import MAX_CLASS, Rows, estimated_bytes
from precis.container import Packed, blocks_of, packed
from precis.core import Prefill, Snapshot
from precis.errors import BudgetTooSmall
from precis.families import Rotary
from precis.observations.fisher import RepeatGradients
from precis.observations.repeat import RepeatAttention
from precis.transform import Transform

EXPONENT = 0.8  # of a token's importance in its precision; 1 would be right if errors stayed where they are
_ROWS = 512  # that sizes are estimated from
_ROUNDS = 14
_SLACK = 0.01  # share of the limit that may stay unused
_TINY = 1e-30


def fitted(
    snapshot: Snapshot, transform: Transform, classes: Tensor, rotary: Rotary, limit: int, key: bytes = b""
) -> Packed:
    """A snapshot in the finest step whose bytes stay within a limit.

    Args:
        snapshot: before any codec.
        transform: of the model.
        classes: [B, T], from `classes_of`.
        rotary: of the model.
        limit: bytes of the whole: blobs, positions, manifest and levels.
        key: seals the manifest, if not empty.

    Raises:
        BudgetTooSmall: if no step is coarse enough.
    """
    codec = TransformCodec(transform, 1.0, classes.to(torch.int64))
    blocks = blocks_of(snapshot, codec, rotary)
    rows = [
        codec.rows(
            block.keys, block.values, layout_of(block.heads, snapshot.header.n_sink, snapshot.geometry.head_dim, i)
        )
        for i, block in enumerate(blocks)
    ]
    room = float(limit)
    best: Packed | None = None
    for _ in range(6):
        found = packed(snapshot, blocks, replace(codec, step=_step(rows, room)), key)
        if found.n_bytes <= limit:
            best = found
            if found.n_bytes >= (1 - _SLACK) * limit:
                break
        room *= 1 + (limit * (1 - _SLACK / 2) - found.n_bytes) / max(limit, found.n_bytes)
        if room <= 0:
            break
    if best is None:
        raise BudgetTooSmall(
            f"{limit} bytes are too few: positions, sinks and tables alone take about as many: allow more",
            n_bytes=limit,
        )
    return best


def classes_of(full: Prefill, block_layers: int) -> Tensor:
    """How much more precision than others each token deserves: [B, T] int64, -8 to 8.

    By the squared attention that a repetition paid to it, over a block's layers and heads, and, where gradients were
    seen, their mean square: their geometric mean. Classes are relative to the mean of the document.

    Raises:
        ValueError: if the document was not repeated.
    """
    importance = _importance(full)
    n_layers, n_kv_heads, n_tokens = importance.shape
    together = importance.reshape(n_layers // block_layers, block_layers * n_kv_heads, n_tokens).mean(1)
    octaves = EXPONENT / 2 * torch.log2(together.clamp_min(_TINY))
    seen = together > _TINY  # protected tokens outside of the document are not repeated: they are as the best tenth
    floor = torch.where(seen, octaves, torch.full_like(octaves, math.nan))
    middle = floor.nanmean(1, keepdim=True).nan_to_num(0.0)
    top = floor.nan_to_num(-math.inf).topk(max(1, n_tokens // 10), 1).values[:, -1:]
    octaves = torch.where(seen, octaves, torch.where(top.isfinite(), top, middle))
    return (octaves - middle).round().clamp(-MAX_CLASS, MAX_CLASS).to(torch.int64).cpu()


def _importance(full: Prefill) -> Tensor:
    """[L, K, T] float32."""
    g = full.geometry
    if RepeatGradients() in full.observed:
        found = full.seen(RepeatGradients())
        information, squares = found[:, g.n_heads : g.n_heads + g.n_kv_heads], found[:, g.n_heads + g.n_kv_heads :]
        return (information * squares).sqrt()
    return full.seen(RepeatAttention())[:, g.n_heads :]


def _step(rows: list[Rows], room: float) -> float:
    """The step whose bytes, estimated from evenly spaced rows, are nearest to `room`."""
    apart = max(1, max(len(part.classes) for part in rows) // _ROWS)
    few = [Rows(part.coefficients[::apart], part.classes[::apart], part.scales) for part in rows]
    share = sum(len(part.classes) for part in rows) / max(1, sum(len(part.classes) for part in few))
    largest = max((float(part.coefficients.abs().max()) for part in rows if part.coefficients.numel()), default=1.0)
    high = math.log2(max(largest, _TINY)) + MAX_CLASS + 1
    low = high - 30  # steps below which float32 cannot count
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        try:
            too_many = estimated_bytes(few, 2**middle) * share > room
        except ValueError:
            too_many = True
        low, high = (middle, high) if too_many else (low, middle)
    return float(2**high)
