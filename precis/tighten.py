"""Cut a stored snapshot down to a smaller budget, without the model and without reading the document again.

Only for policies whose selections are nested. The levels stored with the entries say which go first; kept entries are
decoded and encoded again as the codec has them, before RoPE where it works there. Levels tell
255 steps of a ranking apart: where two entries share one, the earlier token goes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from precis.blob import Block
from precis.container import Packed, packed
from precis.core import Geometry, Ranks, Snapshot, SnapshotHeader
from precis.manifest import Manifest
from precis.ranking import group_count, levels_of, rank_across
from precis.reader import levels_in, read_block, reader_of

_ALWAYS = 255


def tighten(
    manifest: Manifest,
    blobs: Sequence[bytes],
    geometry: Geometry,
    per_head: int,
    n_protected: int,
    header: SnapshotHeader,
    key: bytes = b"",
) -> Packed:
    """Keep `per_head` entries per kv head on average, as the policy would have.

    Args:
        manifest: opened, checked, and with levels.
        blobs: of its layers, and the levels.
        geometry: of the model.
        per_head: of the layers that evict, at least the protected tokens, at most what is there.
        n_protected: tokens that every head keeps at this budget; the snapshot must have protected as many.
        header: of the tightened snapshot.
        key: seals it, if not empty.

    Raises:
        SnapshotCorrupt: if a byte is wrong.
        ValueError: if the snapshot has no levels, protected other tokens, or keeps less already.
    """
    if not manifest.ranked:
        raise ValueError("the snapshot's policy does not nest its selections")
    n_blobs = len(manifest.blob_bytes)
    if n_blobs != manifest.n_layers:
        raise ValueError("layers that are coded together are not cut down")
    raw = levels_in(manifest, blobs)
    codec = reader_of(manifest)
    layers = [read_block(manifest, layer, blobs[layer], codec) for layer in range(n_blobs)]
    positions = torch.from_numpy(np.concatenate([head for layer in layers for head in layer.heads]))
    counts = torch.tensor(manifest.counts).flatten()
    stored = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    levels = dense(stored, positions, counts, geometry, manifest.n_tokens)
    evicting = geometry.evicting_layers(manifest.n_tokens)
    if not bool(((levels[evicting] == _ALWAYS).sum(-1) == n_protected).all()):
        raise ValueError("the snapshot protects other tokens than the smaller budget would")
    if int((levels[evicting] >= 0).sum()) < per_head * len(evicting) * geometry.n_kv_heads:
        raise ValueError("the snapshot keeps less than that already")
    keep, again = choose(levels, geometry, manifest.n_tokens, per_head, manifest.ranked)
    blocks, kept_positions, kept_levels, new_counts = [], [], [], []
    for layer, block in enumerate(layers):  # nested selections are never merged
        inside = [keep[layer, head][torch.from_numpy(own).long()] for head, own in enumerate(block.heads)]
        mask = torch.cat(inside)
        fewer = [own[chosen.numpy()] for own, chosen in zip(block.heads, inside, strict=True)]
        blocks.append(Block(fewer, block.keys[mask], block.values[mask]))
        kept_positions += fewer
        kept_levels += [again[layer, head][torch.from_numpy(own).long()] for head, own in enumerate(fewer)]
        new_counts += [len(own) for own in fewer]
    nothing = torch.zeros(sum(new_counts), geometry.head_dim)
    told = Snapshot(
        geometry,
        header,
        nothing,
        nothing,
        torch.from_numpy(np.concatenate(kept_positions)),
        torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(new_counts).cumsum(0)]),
        Ranks(torch.cat(kept_levels), manifest.ranked),
    )
    return packed(told, blocks, codec, key)


def dense(levels: Tensor, positions: Tensor, counts: Tensor, geometry: Geometry, n_tokens: int) -> Tensor:
    """Levels [N] of kept entries -> [L, K, T] int16, -1 where nothing is kept."""
    found = torch.full((counts.shape[0], n_tokens), -1, dtype=torch.int16)
    heads = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
    found[heads, positions.long()] = levels.to(torch.int16)
    return found.reshape(geometry.n_layers, geometry.n_kv_heads, n_tokens)


def choose(levels: Tensor, geometry: Geometry, n_tokens: int, per_head: int, across: str) -> tuple[Tensor, Tensor]:
    """What is kept [L, K, T] bool, and the levels of what is [L, K, T] uint8."""
    kept = levels >= 0
    always = levels == _ALWAYS
    evicting = geometry.evicting_layers(n_tokens)
    part = levels[evicting].float()
    free = (kept & ~always)[evicting]
    n_groups = group_count(part, across)
    n_heads = part.shape[0] * part.shape[1] // n_groups
    n_always = always[evicting].reshape(n_groups, -1).sum(-1)
    room = (per_head * n_heads - n_always).clamp_min(0).repeat_interleave(n_heads).reshape(*part.shape[:2], 1)
    chosen = (rank_across(part, ~free, across) < room) & free
    keep = kept.clone()
    keep[evicting] = always[evicting] | chosen
    again = torch.full(levels.shape, _ALWAYS, dtype=torch.uint8)
    again[evicting] = torch.where(
        always[evicting], torch.tensor(_ALWAYS, dtype=torch.uint8), levels_of(part, keep[evicting] & free, across)
    )
    return keep, again
