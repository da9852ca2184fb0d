"""Allocators and rankings: totals, floors, ties, and equivariance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.budgets import Allocator
from precis.budgets.adaptive import Adaptive
from precis.budgets.global_ import Global
from precis.budgets.uniform import Uniform
from precis.policies import Policy
from precis.ranking import counts_of_best, rank_per_head
from precis.scorers.sage import Sage
from precis.selectors.topk import TopK

ALLOCATORS = [Uniform(), Adaptive(), Adaptive(safeguard=0.0), Global(), Global(safeguard=0.3)]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@given(seed=st.integers(0, 1000), n_protected=st.integers(0, 5), free=st.integers(0, 15), ties=st.booleans())
@settings(max_examples=40, deadline=None)
def test_budgets_sum_to_the_total_and_fit_the_context(
    allocator: Allocator, seed: int, n_protected: int, free: int, ties: bool
) -> None:
    scores = torch.rand(3, 2, 20, generator=torch.Generator().manual_seed(seed))
    scores = scores.round(decimals=1) if ties else scores
    protected = torch.arange(20) < n_protected
    per_head = min(20, n_protected + free)
    budgets = allocator.allocate(scores, protected, per_head)
    assert int(budgets.sum()) == 3 * 2 * per_head
    assert int(budgets.min()) >= n_protected
    assert int(budgets.max()) <= 20
    keep = TopK().select(None, scores, budgets, protected)  # type: ignore[arg-type]
    assert torch.equal(keep.sum(-1), budgets)
    assert bool(keep[..., :n_protected].all())


def test_the_safeguard_is_a_floor_for_every_head() -> None:
    scores = torch.stack([torch.ones(10), torch.zeros(10)])[None]
    protected = torch.zeros(10, dtype=torch.bool)
    assert Adaptive(safeguard=0.5).allocate(scores, protected, 4).tolist() == [[6, 2]]
    assert Adaptive(safeguard=0.0).allocate(scores, protected, 4).tolist() == [[8, 0]]


def test_permuting_heads_permutes_budgets() -> None:
    scores = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(0))
    protected = torch.zeros(30, dtype=torch.bool)
    order = [2, 0, 1]
    assert torch.equal(
        Adaptive().allocate(scores[:, order], protected, 9), Adaptive().allocate(scores, protected, 9)[:, order]
    )


def test_a_global_budget_moves_between_layers() -> None:
    scores = torch.stack([torch.ones(1, 10), torch.zeros(1, 10)])
    budgets = Global().allocate(scores, torch.zeros(10, dtype=torch.bool), 4)
    assert budgets.tolist() == [[8], [0]]


def test_of_equal_scores_the_later_token_wins() -> None:
    ranks = rank_per_head(torch.zeros(1, 1, 4), torch.zeros(4, dtype=torch.bool))
    assert ranks.tolist() == [[[3, 2, 1, 0]]]
    assert counts_of_best(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), 3).tolist() == [2, 1]


def test_scores_that_cannot_be_compared_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="comparable across a head only"):
        Policy(Sage(), Global(), TopK())
