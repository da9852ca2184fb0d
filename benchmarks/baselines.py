"""Baselines of the codec bench: like KVTC and like CacheGen, not those papers' codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from precis import rans
from precis.axes import entries_of
from precis.container import CODECS, block_of
from precis.core import Snapshot
from precis.families import Model, Rotary
from precis.full_cache import Between, Document
from precis.observations.repeat import SINKS
from precis.prefill import prefill
from precis.transform import Transform, fit

_GROUP, _SCALE_BYTES, _ROUNDS = 10, 2, 12
_FINER = 4.0  # anchors than deltas
_LARGEST = 127.0


@torch.no_grad()
def kvtc_like(
    served_model: Model,
    rotary: Rotary,
    documents: Sequence[Document],
    block_layers: int,
    rank: int,
    _differentiated: int,
    between: Between,
) -> Transform:
    """Axes as in KVTC (arXiv:2511.01815): of keys and of values apart, every error counted alike.

    Not the paper's codec: bits follow from one step and entropy coding instead of dynamic programming and DEFLATE, keys
    and values are scaled to equal variance, and no window of recent tokens is kept in 16 bits.
    """
    g = served_model.geometry
    entries = []
    for index, document in enumerate(documents):
        full = prefill(served_model, rotary, document)
        entries.append(entries_of(rotary, full.keys, full.values)[SINKS:])
        between("calibrate", index + 1, len(documents))
    every = torch.cat(entries)
    mean = every.mean(0)
    centred = (every - mean).reshape(len(every), g.n_layers // block_layers, block_layers, 2, -1)
    level = centred.square().mean((0, 1, 2, 4))
    metric = torch.eye(g.head_dim) / level[:, None, None, None]
    fisher = metric.expand(g.n_layers, -1, g.n_kv_heads, -1, -1).contiguous()
    kinds = torch.arange(2).repeat_interleave(g.n_kv_heads * g.head_dim).repeat(block_layers)
    blocks = centred.flatten(2).transpose(0, 1)
    covariance = blocks.transpose(1, 2) @ blocks / len(every) * (kinds[:, None] == kinds[None])
    return fit(mean, covariance, fisher, rank)


def cachegen_like(snapshot: Snapshot, rotary: Rotary, limit: int) -> tuple[Snapshot, int]:
    """What comes back of a snapshot that keeps all entries, and the bytes it took.

    As in CacheGen (Liu et al. 2024, arXiv:2310.07240): groups of ten tokens, whose first is the anchor of the others'
    deltas; vectors scaled by their largest number; keys in 32 bins in the first third of the layers and 16 in the
    others, values in 32 in the first two layers and 16 in the others; entropy coding by channel and layer. Not the
    paper's codec, in its favour: keys before RoPE, sinks in 16 bits, no byte counted for tables of frequencies, and
    all bins finer or coarser by one factor, so that it takes any number of bytes.

    Args:
        snapshot: before any codec, of a model with full attention in every layer.
        rotary: of the model.
        limit: bytes at most, if any factor is coarse enough.
    """
    n_layers = snapshot.geometry.n_layers
    blocks = [block_of(snapshot, range(layer, layer + 1), CODECS["int8"], rotary) for layer in range(n_layers)]
    vectors = [
        tuple(
            part.float().view(snapshot.geometry.n_kv_heads, -1, part.shape[1]).transpose(0, 1).flatten(1)
            for part in (block.keys, block.values)
        )
        for block in blocks
    ]
    low, high = -7.0, 3.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        found = [_coded(own, layer, n_layers, 2.0**middle, snapshot.header.n_sink) for layer, own in enumerate(vectors)]
        low, high = (low, middle) if sum(n for _, n in found) > limit else (middle, high)
    found = [_coded(own, layer, n_layers, 2.0**low, snapshot.header.n_sink) for layer, own in enumerate(vectors)]
    keys, values = [], []
    for layer, ((key, value), _) in enumerate(found):
        own = slice(snapshot.bounds(layer, 0)[0], snapshot.bounds(layer, snapshot.geometry.n_kv_heads - 1)[1])
        as_heads = [
            part.view(len(part), -1, snapshot.geometry.head_dim).transpose(0, 1).flatten(0, 1) for part in (key, value)
        ]
        keys.append(rotary.redo(layer, as_heads[0], snapshot.positions[own]))
        values.append(as_heads[1])
    dtype = snapshot.keys.dtype
    again = replace(snapshot, keys=torch.cat(keys).to(dtype), values=torch.cat(values).to(dtype))
    return again, sum(n for _, n in found)


def _coded(
    vectors: tuple[Tensor, ...], layer: int, n_layers: int, factor: float, n_sink: int
) -> tuple[tuple[Tensor, ...], int]:
    """Keys and values [T, K*D] of a layer as they come back, and their bytes."""
    bins = (32 if layer < n_layers // 3 else 16, 32 if layer < 2 else 16)
    made, n_bytes = [], 0
    for part, n_bins in zip(vectors, bins, strict=True):
        steps = (n_bins // 2 - 1) * factor
        rest = part[n_sink:]
        heads = rest[::_GROUP]
        anchor_codes, anchors = _quantised(heads, min(_LARGEST, _FINER * steps))
        anchors = anchors.repeat_interleave(_GROUP, 0)[: len(rest)]
        codes, deltas = _quantised(rest - anchors, steps)
        inner = torch.arange(len(rest)) % _GROUP != 0
        made.append(torch.cat([part[:n_sink], anchors + deltas * inner[:, None]]))
        n_bytes += _entropy_coded(anchor_codes) + _entropy_coded(codes[inner])
        n_bytes += len(rest) * _SCALE_BYTES + n_sink * part.shape[1] * 2
    return tuple(made), n_bytes


def _quantised(vectors: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """Codes of vectors [n, C] scaled by their largest number, and the vectors they stand for."""
    scale = vectors.abs().amax(1, keepdim=True).clamp_min(1e-6).half().float()
    codes = (vectors / scale * steps).round().clamp(-_LARGEST, _LARGEST)
    return codes, codes * scale / steps


def _entropy_coded(codes: Tensor) -> int:
    """Bytes of codes [n, C], with one table per channel."""
    symbols = (codes.long() + 128).T.contiguous().numpy().astype(np.uint8)
    n_bytes = 0
    for own in np.array_split(symbols, -(-len(symbols) // rans.N_SYMBOLS)):
        tables = rans.frequencies(np.stack([np.bincount(row, minlength=rans.N_SYMBOLS) for row in own]))
        contexts = np.repeat(np.arange(len(own), dtype=np.uint8), own.shape[1])
        n_bytes += len(rans.encode(own.flatten(), contexts, tables))
    return n_bytes
