"""From scores to kept entries: protect, allocate, select, gather."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from precis.core import Prefill, Ranks, Selection, Snapshot, SnapshotHeader
from precis.families import Rotary
from precis.mergers import Merger
from precis.policies import Policy
from precis.ranking import levels_of


def protected_mask(n_tokens: int, spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """[T] bool, True = every head keeps this token."""
    mask = torch.zeros(n_tokens, dtype=torch.bool, device=device)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def ranks_of(prefill: Prefill, scores: Tensor, policy: Policy, protected: Tensor, selection: Selection) -> Ranks | None:
    """Levels of the kept entries, or None where the policy's selections are not nested."""
    if policy.nested is None:
        return None
    g, n_tokens = prefill.geometry, prefill.n_tokens
    index = selection.flat_index(n_tokens)
    kept = torch.zeros(g.n_layers * g.n_kv_heads * n_tokens, dtype=torch.bool, device=scores.device)
    kept[index] = True
    levels = torch.full((g.n_layers, g.n_kv_heads, n_tokens), 255, dtype=torch.uint8, device=scores.device)
    evicting = g.evicting_layers(n_tokens)
    if evicting:
        competing = kept.view(levels.shape)[evicting] & ~protected
        found = levels_of(scores, competing, policy.nested)
        levels[evicting] = torch.where(protected, levels[evicting], found)
    return Ranks(levels.flatten()[index], policy.nested)


def choose(prefill: Prefill, scores: Tensor, policy: Policy, protected: Tensor, per_head: int) -> Selection:
    """Allocate and select in the layers that evict; a layer with a full sliding window keeps that window.

    Args:
        prefill: the full cache and observations.
        scores: [layers that evict, K, T] float32, from `score`.
        policy: its allocator and selector are used.
        protected: [T] bool.
        per_head: mean entries per kv head of the layers that evict.
    """
    g, n_tokens = prefill.geometry, prefill.n_tokens
    keep = torch.ones(g.n_layers, g.n_kv_heads, n_tokens, dtype=torch.bool, device=prefill.keys.device)
    for layer in range(g.n_layers):
        keep[layer, :, : g.first_visible(layer, n_tokens)] = False
    evicting = g.evicting_layers(n_tokens)
    if evicting:
        part = prefill.of_layers(evicting)
        budgets = policy.allocator.allocate(part, scores, protected, per_head)
        keep[evicting] = policy.selector.select(part, scores, budgets, protected)
    return Selection.from_mask(keep)


def score(prefill: Prefill, policy: Policy) -> Tensor:
    """Scores [layers that evict, K, T] float32."""
    part = prefill.of_layers(prefill.geometry.evicting_layers(prefill.n_tokens))
    return policy.scorer.score(part)


def gather(prefill: Prefill, selection: Selection, header: SnapshotHeader, ranks: Ranks | None = None) -> Snapshot:
    """Copy the selected entries out of the full cache."""
    g, index = prefill.geometry, selection.flat_index(prefill.n_tokens)
    keys = prefill.keys.reshape(-1, g.head_dim)[index]
    values = prefill.values.reshape(-1, g.head_dim)[index]
    return Snapshot(g, header, keys, values, selection.positions, selection.offsets.cpu(), ranks)


def merge(
    kept: Snapshot, prefill: Prefill, scores: Tensor, merger: Merger, protected: Tensor, rotary: Rotary
) -> Snapshot:
    """Let kept entries take in evicted ones.

    Args:
        kept: gathered from `prefill`.
        prefill: the full cache.
        scores: [layers that evict, K, T] float32.
        merger: of the policy.
        protected: [T] bool.
        rotary: of the model.
    """
    g, n_tokens = prefill.geometry, prefill.n_tokens
    evicting = g.evicting_layers(n_tokens)
    if not evicting:
        return kept
    index = Selection(kept.positions, kept.offsets.to(kept.positions.device)).flat_index(n_tokens)
    places = torch.full((g.n_layers * g.n_kv_heads * n_tokens,), -1, dtype=torch.int64, device=index.device)
    places[index] = torch.arange(index.shape[0], device=index.device)
    rows = places.view(g.n_layers, g.n_kv_heads, n_tokens)[evicting]
    part = prefill.of_layers(evicting)
    positions = torch.arange(n_tokens, device=index.device).repeat(g.n_kv_heads)
    plain = [rotary.undo(layer, prefill.keys[layer].flatten(0, 1), positions) for layer in evicting]
    plain_keys = torch.stack(plain).view(part.keys.shape)
    merged = merger.merge(part, plain_keys, scores, rows >= 0, protected)
    keys, values = kept.keys.clone(), kept.values.clone()
    changed = merged.changed & (rows >= 0)
    values[rows[changed]] = merged.values[changed].to(values.dtype)
    if merged.keys is not None:
        for at, layer in enumerate(evicting):
            here = changed[at]
            turned = rotary.redo(layer, merged.keys[at][here], here.nonzero()[:, 1])
            keys[rows[at][here]] = turned.to(keys.dtype)
    bias = None
    if merged.bias is not None:
        bias = torch.zeros(index.shape[0], device=index.device)
        bias[rows[changed]] = merged.bias[changed]
    return replace(kept, keys=keys, values=values, bias=bias)
