"""Fit a model's transform: read documents, and gather what its keys and values have in common.

Means and covariances come from every document, Fisher matrices from the first few, since a backward pass costs more and
the matrices need fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precis.families import Model, Rotary
from precis.full_cache import Between, Document, silent
from precis.observations.metric import RepeatMetric
from precis.observations.repeat import SINKS
from precis.prefill import prefill
from precis.transform import Transform, fit


@torch.no_grad()
def measure(
    model: Model,
    rotary: Rotary,
    documents: Sequence[Document],
    block_layers: int,
    rank: int,
    n_differentiated: int,
    between: Between = silent,
) -> Transform:
    """The transform of a model.

    Args:
        model: from `attention.plug.attach`.
        rotary: of the model.
        documents: texts of the kinds that will be compressed, more tokens than a block has numbers if they are to tell
            its axes apart.
        block_layers: g; must divide the model's layers.
        rank: axes to keep per block.
        n_differentiated: documents that Fisher matrices come from, at least one.
        between: called after each document with ("calibrate", done, total).

    Raises:
        ValueError: if the layers cannot be divided, or no document has a token besides the first few.
    """
    g = model.geometry
    if block_layers < 1 or g.n_layers % block_layers:
        raise ValueError(f"{g.n_layers} layers cannot be divided into blocks of {block_layers}")
    n_blocks, size = g.n_layers // block_layers, block_layers * 2 * g.n_kv_heads * g.head_dim
    sums = torch.zeros(g.n_layers, 2, g.n_kv_heads, g.head_dim, device=model.device)
    products = torch.zeros(n_blocks, size, size, device=model.device)
    fisher = torch.zeros(*sums.shape, g.head_dim, device=model.device)
    n_tokens = 0
    between("calibrate", 0, len(documents))
    for index, document in enumerate(documents):
        needs = [RepeatMetric()] if index < n_differentiated else []
        full = prefill(model, rotary, document, needs)
        entries = entries_of(rotary, full.keys, full.values)[SINKS:]
        sums += entries.sum(0)
        blocks = entries.reshape(-1, n_blocks, size).transpose(0, 1)
        products.baddbmm_(blocks.transpose(1, 2), blocks)
        n_tokens += entries.shape[0]
        if needs:
            fisher += full.seen(needs[0]) * entries.shape[0]
        between("calibrate", index + 1, len(documents))
    if n_tokens == 0:
        raise ValueError("the documents are too short to tell anything of the model")
    mean = sums / n_tokens
    centre = mean.view(n_blocks, size)
    covariance = products / n_tokens - centre[:, :, None] * centre[:, None]
    return fit(mean.cpu(), covariance.cpu(), fisher.cpu(), min(rank, size))


def entries_of(rotary: Rotary, keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values [L, K, T, D] of a full cache -> entries [T, L, 2, K, D] float32, keys before RoPE."""
    n_layers, n_kv_heads, n_tokens, dim = keys.shape
    positions = torch.arange(n_tokens, device=keys.device).repeat(n_kv_heads)
    before = [rotary.undo(layer, keys[layer].reshape(-1, dim), positions) for layer in range(n_layers)]
    both = torch.stack([torch.stack(before).view(keys.shape), values.float()], 1)
    return both.permute(3, 0, 1, 2, 4)
