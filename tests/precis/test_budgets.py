"""Allocators and rankings: totals, floors, ties, and equivariance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.budgets import Allocator
from precis.budgets.adaptive import Adaptive
from precis.budgets.consistency import Consistency
from precis.budgets.convex import Convex
from precis.budgets.global_ import Global
from precis.budgets.heads import TwoLevel
from precis.budgets.layer_errors import LayerErrors
from precis.budgets.mass import Mass
from precis.budgets.pyramid import Pyramid
from precis.budgets.threshold import Threshold
from precis.budgets.uniform import Uniform
from precis.core import Geometry, Prefill
from precis.observations.window import WindowQueries
from precis.policies import Policy
from precis.ranking import counts_of_best, rank_per_head
from precis.scorers.expected import Expected
from precis.scorers.keydiff import KeyDiff
from precis.scorers.kvzip import KVzip
from precis.scorers.sage import Sage
from precis.selectors.topk import TopK
from precis.selectors.two_stage import TwoStage

ALLOCATORS = [
    Uniform(),
    Adaptive(),
    Adaptive(safeguard=0.0),
    Convex(),
    Convex(floor_share=1.0),
    Global(),
    Global(safeguard=0.3),
    Pyramid(),
    Pyramid(beta=1.0),
    TwoLevel(),
    TwoLevel(by_table=True),
    LayerErrors(),
    LayerErrors(floor=2, cap=1.5),
    Consistency(n_window=4),
]


def empty_prefill(n_layers: int, n_kv_heads: int, n_tokens: int, seed: int = 0) -> Prefill:
    """Random keys and window queries, two query heads per kv head."""
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry(
        n_layers, 2 * n_kv_heads, n_kv_heads, 4, 64, (None,) * n_layers, (1.0,) * n_layers, (None,) * n_layers
    )
    keys = torch.randn(n_layers, n_kv_heads, n_tokens, 4, generator=generator)
    queries = {n: torch.randn(n_layers, 2 * n_kv_heads, n, 4, generator=generator) for n in (1, 4)}
    tables = {
        "importance": torch.rand(n_layers, n_kv_heads, generator=generator),
        "layer_errors": queries[1][:, 0, 0, 0].abs(),
    }
    return Prefill(geometry, keys, keys, {WindowQueries(n): found for n, found in queries.items()}, tables)


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
    budgets = allocator.allocate(empty_prefill(3, 2, 20), scores, protected, per_head)
    assert int(budgets.sum()) == 3 * 2 * per_head
    assert int(budgets.min()) >= n_protected
    assert int(budgets.max()) <= 20
    keep = TopK().select(None, scores, budgets, protected)  # type: ignore[arg-type]
    assert torch.equal(keep.sum(-1), budgets)
    assert bool(keep[..., :n_protected].all())


def test_the_safeguard_is_a_floor_for_every_head() -> None:
    scores = torch.stack([torch.ones(10), torch.zeros(10)])[None]
    protected = torch.zeros(10, dtype=torch.bool)
    assert Adaptive(safeguard=0.5).allocate(empty_prefill(1, 2, 10), scores, protected, 4).tolist() == [[6, 2]]
    assert Adaptive(safeguard=0.0).allocate(empty_prefill(1, 2, 10), scores, protected, 4).tolist() == [[8, 0]]


def test_permuting_heads_permutes_budgets() -> None:
    scores = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(0))
    protected = torch.zeros(30, dtype=torch.bool)
    order = [2, 0, 1]
    nothing = empty_prefill(2, 3, 30)
    for allocator in (Adaptive(), Convex()):
        permuted = allocator.allocate(nothing, scores[:, order], protected, 9)
        assert torch.equal(permuted, allocator.allocate(nothing, scores, protected, 9)[:, order])


def test_a_global_budget_moves_between_layers() -> None:
    scores = torch.stack([torch.ones(1, 10), torch.zeros(1, 10)])
    budgets = Global().allocate(empty_prefill(2, 1, 10), scores, torch.zeros(10, dtype=torch.bool), 4)
    assert budgets.tolist() == [[8], [0]]


def test_of_equal_scores_the_later_token_wins() -> None:
    ranks = rank_per_head(torch.zeros(1, 1, 4), torch.zeros(4, dtype=torch.bool))
    assert ranks.tolist() == [[[3, 2, 1, 0]]]
    assert counts_of_best(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), 3).tolist() == [2, 1]


def test_scores_that_cannot_be_compared_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="comparable across a head only"):
        Policy(Sage(), Global(), TopK())


def test_critical_selection_refuses_scores_that_are_no_attention_or_weighted_already() -> None:
    for scorer in (Expected(), KVzip(plus=True), Sage(), KeyDiff()):
        with pytest.raises(ValueError, match="no plain attention"):
            Policy(scorer, Uniform(), TwoStage())


def test_the_papers_adaptive_budgets_are_a_mix_of_adaptive_and_equal_ones() -> None:
    scores = torch.stack([torch.ones(10), torch.zeros(10)])[None]
    protected, nothing = torch.zeros(10, dtype=torch.bool), empty_prefill(1, 2, 10)
    assert Convex(floor_share=0.0).allocate(nothing, scores, protected, 4).tolist() == [[8, 0]]
    assert Convex(floor_share=0.5).allocate(nothing, scores, protected, 4).tolist() == [[6, 2]]
    assert Convex(floor_share=1.0).allocate(nothing, scores, protected, 4).tolist() == [[4, 4]]


def test_the_pyramid_falls_from_layer_to_layer_and_flattens_where_it_would_exceed_the_context() -> None:
    scores, protected = torch.zeros(5, 2, 100), torch.arange(100) < 4
    steep = Pyramid(beta=20.0).allocate(empty_prefill(5, 2, 100), scores, protected, 24)[:, 0]
    assert steep.tolist() == [43, 34, 24, 14, 5]  # free budgets from 39 to 1, mean 20
    flat = Pyramid(beta=20.0).allocate(empty_prefill(5, 2, 100), scores, protected, 80)[:, 0]
    assert flat.tolist() == [100, 90, 80, 70, 60]


def test_a_threshold_finds_its_budget_and_respects_the_ceiling() -> None:
    scores = torch.tensor([[[0.5, 1.0, 2.0, 3.0], [0.1, 0.2, 0.3, 1.5]]])
    protected = torch.tensor([True, False, False, False])
    nothing = empty_prefill(1, 2, 4)
    assert Threshold(1.0).allocate(nothing, scores, protected, 4).tolist() == [[4, 2]]
    assert Threshold(1.0).allocate(nothing, scores, protected, 2).tolist() == [[3, 1]]
    assert Threshold(9.0).allocate(nothing, scores, protected, 4).tolist() == [[1, 1]]


def test_mass_keeps_the_smallest_suffix_that_holds_the_norm() -> None:
    prefill, protected = empty_prefill(3, 2, 20), torch.arange(20) < 2
    scores = torch.arange(20.0).expand(3, 2, 20)
    budgets = Mass(loss=0.1).allocate(prefill, scores, protected, 20)
    for layer in range(3):
        queries = prefill.seen(WindowQueries(1))[layer, :, 0].reshape(2, 2, 4)
        weights = torch.softmax(queries @ prefill.keys[layer].transpose(1, 2), -1)
        squares = weights.square().mean(1).sum(0)
        squares[19] = 0  # the last token's own
        enough = [n for n in range(1, 19) if squares[20 - n :].sum().sqrt() >= 0.9 * squares[2:].sum().sqrt()]
        assert budgets[layer].tolist() == [2 + enough[0]] * 2
    assert Mass(loss=0.1).allocate(prefill, scores, protected, 3).max() <= 3


def test_two_levels_fill_the_most_important_heads_and_leave_the_rest_protected_only() -> None:
    scores = torch.zeros(2, 2, 10)
    scores[1, 0, 3], scores[0, 1, 7] = 0.9, 0.5
    protected, nothing = torch.arange(10) < 2, empty_prefill(2, 2, 10)
    assert TwoLevel().allocate(nothing, scores, protected, 5).tolist() == [[2, 6], [10, 2]]
    table = {"importance": torch.tensor([[0.1, 0.2], [0.9, 0.2]])}
    by_table = TwoLevel(by_table=True).allocate(replace(nothing, tables=table), scores, protected, 5)
    assert by_table.tolist() == [[2, 6], [10, 2]]  # of equals the first
    with pytest.raises(ValueError, match="precis calibrate"):
        TwoLevel(by_table=True).allocate(replace(nothing, tables={}), scores, protected, 5)


def test_layers_share_by_their_errors_up_to_three_times_the_mean() -> None:
    prefill = replace(empty_prefill(4, 2, 100), tables={"layer_errors": torch.tensor([0.0, 1.0, 3.0, 96.0])})
    protected, scores = torch.arange(100) < 2, torch.zeros(4, 2, 100)
    budgets = LayerErrors(floor=4).allocate(prefill, scores, protected, 22)
    # 4 x 20 free: 4 each, of the rest the last layer would get 61 of 64, but 60 at most in all: 8 are shared 1 to 3
    assert budgets.tolist() == [[6, 6], [8, 8], [12, 12], [62, 62]]
    assert LayerErrors(floor=30).allocate(prefill, scores, protected, 22).tolist() == [[22, 22]] * 4


def test_heads_whose_attention_varies_keep_everything() -> None:
    prefill = empty_prefill(3, 2, 20, seed=3)
    protected = torch.arange(20) < 2
    allocator = Consistency(n_window=4, adaptive_share=0.2)
    budgets = allocator.allocate(prefill, torch.zeros(3, 2, 20), protected, 12)
    variation = allocator.variation(prefill)
    assert budgets.flatten()[variation.argmax()] == 20
    assert sorted(budgets.flatten().tolist()) == [10, 10, 10, 11, 11, 20]
    rows = torch.softmax(
        (prefill.seen(WindowQueries(4))[0, 0] @ prefill.keys[0, 0].T).masked_fill(
            torch.arange(20) > torch.arange(16, 20)[:, None], float("-inf")
        ),
        -1,
    )
    other = torch.softmax(
        (prefill.seen(WindowQueries(4))[0, 1] @ prefill.keys[0, 0].T).masked_fill(
            torch.arange(20) > torch.arange(16, 20)[:, None], float("-inf")
        ),
        -1,
    )
    mass = (rows + other)[:, : 20 - 4] / 2
    on_critical = mass[:, mass.mean(0).argmax()]
    torch.testing.assert_close(variation[0, 0], on_critical.std() / on_critical.mean())
