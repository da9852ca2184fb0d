"""CriticalKV: the bound of arXiv:2502.03805 holds, and the second stage minimises it."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precis.core import Geometry, Prefill
from precis.observations.norms import OutputNorms
from precis.selectors.two_stage import TwoStage
from precis.wire.presets import PRESETS

N, D, HIDDEN = 9, 4, 6


def random_head(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention row [n], values [n, D] and W_o [D, hidden] of one head."""
    generator = torch.Generator().manual_seed(seed)
    attention = torch.softmax(2 * torch.randn(N, generator=generator, dtype=torch.float64), 0)
    values = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return attention, values, torch.randn(D, HIDDEN, generator=generator, dtype=torch.float64)


def bound(attention: Tensor, norms: Tensor, keep: Tensor, mass: Tensor) -> Tensor:
    """C - (2 - 1/mass) * sum of kept A ||v W_o||_1."""
    weighted = attention * norms
    return weighted.sum() - (2 - 1 / mass) * weighted[keep].sum()


def select(attention: Tensor, norms: Tensor, budget: int) -> Tensor:
    geometry = Geometry(1, 1, 1, D, N, (None,), (1.0,), (None,))
    empty = torch.zeros(1, 1, N, D)
    prefill = Prefill(geometry, empty, empty, {OutputNorms(): norms.float()[None, None]})
    nothing = torch.zeros(N, dtype=torch.bool)
    chosen = TwoStage(epsilon=0.0).select(prefill, attention.float()[None, None], torch.tensor([[budget]]), nothing)
    return chosen[0, 0]


@given(seed=st.integers(0, 10_000), budget=st.integers(2, N - 1))
@settings(max_examples=200, deadline=None)
def test_true_output_error_is_within_the_bound_and_the_bound_within_its_relaxation(seed: int, budget: int) -> None:
    attention, values, weight = random_head(seed)
    projected = values @ weight
    norms = projected.abs().sum(-1)
    keep = select(attention, norms, budget)
    first = attention.argsort(descending=True)[: budget // 2]
    mass, first_mass = attention[keep].sum(), attention[first].sum()
    renormalised = torch.where(keep, attention, 0) / mass
    error = (attention @ projected - renormalised @ projected).abs().sum()
    assert error <= bound(attention, norms, keep, mass) + 1e-9
    assert bound(attention, norms, keep, mass) <= bound(attention, norms, keep, first_mass) + 1e-9


@given(seed=st.integers(0, 10_000), budget=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_second_stage_is_the_best_superset_of_the_first(seed: int, budget: int) -> None:
    attention, values, weight = random_head(seed)
    norms = (values @ weight).abs().sum(-1)
    keep = select(attention, norms, budget)
    first = attention.argsort(descending=True)[: budget // 2].tolist()
    first_mass = attention[first].sum()
    if first_mass <= 0.5:  # the guarantee is void there
        return
    rest = [i for i in range(N) if i not in first]
    supersets = [torch.tensor([*first, *more]) for more in combinations(rest, budget - len(first))]
    best = min(float(bound(attention, norms, s, first_mass)) for s in supersets)
    assert float(bound(attention, norms, keep, first_mass)) <= best + 1e-6
    assert set(first) <= set(keep.nonzero()[:, 0].tolist())


def test_sinks_with_small_values_survive_since_they_are_protected() -> None:
    assert PRESETS["criticalkv"].n_sink == 4
    geometry = Geometry(1, 1, 1, D, N, (None,), (1.0,), (None,))
    empty = torch.zeros(1, 1, N, D)
    norms = torch.ones(1, 1, N)
    norms[..., :4] = 0
    protected = torch.arange(N) < 4
    scores = torch.arange(N, dtype=torch.float32)[None, None]
    keep = TwoStage().select(
        Prefill(geometry, empty, empty, {OutputNorms(): norms}), scores, torch.tensor([[5]]), protected
    )
    assert keep[0, 0, :4].all()
    assert int(keep.sum()) == 5
