"""From scores to kept entries: protect, allocate, select, gather."""

from __future__ import annotations

import torch
from torch import Tensor

from precis.core import Prefill, Ranks, Selection, Snapshot, SnapshotHeader
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
