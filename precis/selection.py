"""From scores to kept entries: protect, allocate, select, gather."""

from __future__ import annotations

import torch
from torch import Tensor

from precis.core import Prefill, Selection, Snapshot, SnapshotHeader
from precis.policies import Policy


def protected_mask(n_tokens: int, spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """[T] bool, True = every head keeps this token."""
    mask = torch.zeros(n_tokens, dtype=torch.bool, device=device)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def choose(prefill: Prefill, scores: Tensor, policy: Policy, protected: Tensor, per_head: int) -> Selection:
    """Allocate and select in the layers that evict; a layer with a full sliding window keeps that window.

    Args:
        prefill: the full cache and observations.
        scores: [L, K, T] float32.
        policy: its allocator and selector are used.
        protected: [T] bool.
        per_head: mean entries per kv head of the layers that evict.
    """
    g, n_tokens = prefill.geometry, prefill.n_tokens
    keep = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    evicting = [layer for layer in range(g.n_layers) if g.evicts(layer, n_tokens)]
    for layer in set(range(g.n_layers)) - set(evicting):
        keep[layer, :, g.first_visible(layer, n_tokens) :] = True
    if evicting:
        norms = prefill.output_norms
        part = Prefill(
            prefill.geometry, prefill.keys, prefill.values, output_norms=None if norms is None else norms[evicting]
        )
        budgets = policy.allocator.allocate(scores[evicting], protected, per_head)
        keep[evicting] = policy.selector.select(part, scores[evicting], budgets, protected)
    return Selection.from_mask(keep)


def gather(prefill: Prefill, selection: Selection, header: SnapshotHeader) -> Snapshot:
    """Copy the selected entries out of the full cache."""
    g, n_tokens = prefill.geometry, prefill.n_tokens
    counts = selection.offsets[1:] - selection.offsets[:-1]
    head = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    index = head * n_tokens + selection.positions.long()
    keys = prefill.keys.reshape(-1, g.head_dim)[index]
    values = prefill.values.reshape(-1, g.head_dim)[index]
    return Snapshot(g, header, keys, values, selection.positions, selection.offsets.cpu())
