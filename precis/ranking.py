"""Ranks of scores, with ties broken by position in float32, so that one document always gives one selection."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_per_head(scores: Tensor, excluded: Tensor) -> Tensor:
    """Rank of each token inside its head: 0 is the best; of equal scores the later token is better.

    Args:
        scores: [L, K, T] float32.
        excluded: bool, broadcastable to scores: ranked behind all others.

    Returns:
        [L, K, T] int64.
    """
    return rank_across(scores, excluded, "head")


def counts_of_best(scores: Tensor, open_mask: Tensor, n_best: int) -> Tensor:
    """How many of the overall `n_best` entries fall into each head; of equal scores later tokens, then lower heads win.

    Args:
        scores: [heads, T] float32.
        open_mask: [heads, T] bool, entries that take part.
        n_best: entries to hand out, at most as many as take part.

    Returns:
        [heads] int64.
    """
    n_heads = scores.shape[0]
    flat = scores.float().masked_fill(~open_mask, float("-inf")).flip(-1).T.reshape(-1)
    order = torch.sort(flat, descending=True, stable=True).indices[:n_best]
    return torch.bincount(order % n_heads, minlength=n_heads)


def best_with_floor(scores: Tensor, protected: Tensor, n_best: int, floor: int) -> Tensor:
    """Count per head: `floor` of its own best entries, and of the rest whichever are best overall.

    Args:
        scores: [heads, T] float32.
        protected: [T] bool, not counted.
        n_best: entries to hand out, at least heads * floor.
        floor: entries that every head is sure of.

    Returns:
        [heads] int64 summing to n_best.
    """
    own = rank_per_head(scores[None], protected)[0] < floor
    return counts_of_best(scores, ~(own | protected), n_best - floor * scores.shape[0]) + floor


def group_count(scores: Tensor, across: str) -> int:
    """Groups of heads in [L, K, ...] that are ranked together: "head", "layer" or "global"."""
    return {"head": scores.shape[0] * scores.shape[1], "layer": scores.shape[0], "global": 1}[across]


def rank_across(scores: Tensor, excluded: Tensor, across: str) -> Tensor:
    """Rank of each entry inside its group: 0 is the best; of equal scores later tokens, then lower heads win.

    Args:
        scores: [L, K, T].
        excluded: bool, broadcastable to scores: ranked behind all others.
        across: "head", "layer" or "global": what a group is.

    Returns:
        [L, K, T] int64.
    """
    n_groups, n_tokens = group_count(scores, across), scores.shape[-1]
    n_heads = scores.shape[0] * scores.shape[1] // n_groups
    open_scores = scores.float().masked_fill(excluded, float("-inf"))
    by_token = open_scores.reshape(n_groups, n_heads, n_tokens).flip(-1).transpose(1, 2).flatten(1)
    order = torch.sort(by_token, dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    return ranks.reshape(n_groups, n_tokens, n_heads).transpose(1, 2).flip(-1).reshape(scores.shape)


def levels_of(scores: Tensor, kept: Tensor, across: str) -> Tensor:
    """How long each kept entry would be kept if the budget shrank: [L, K, T] uint8 in [0, 254], 0 where not kept.

    Args:
        scores: [L, K, T] float32.
        kept: [L, K, T] bool, the entries that compete; protected ones do not.
        across: "head", "layer" or "global": the entries among which a level counts.
    """
    n_groups = group_count(scores, across)
    competing = kept.reshape(n_groups, -1).sum(-1).clamp_min(1)
    per_head = competing.repeat_interleave(scores.shape[0] * scores.shape[1] // n_groups)
    levels = 254 - rank_across(scores, ~kept, across) * 255 // per_head.reshape(*scores.shape[:2], 1)
    return levels.clamp_min(0).masked_fill(~kept, 0).to(torch.uint8)


def shared_out(wanted: Tensor, total: int) -> Tensor:
    """Whole numbers near `wanted` that sum to `total`: rounded down, then one more for the largest remainders.

    Args:
        wanted: [n] float, not negative, summing to about `total`.
        total: sum of the result.

    Returns:
        [n] int64; of equal remainders the first ones win.
    """
    whole = wanted.floor()
    order = torch.sort(wanted - whole, descending=True, stable=True).indices
    counts = whole.long()
    missing = total - int(counts.sum())
    counts[order[: max(0, missing)]] += 1
    return counts
