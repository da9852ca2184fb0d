"""Views that look again at every token: Quest and ClusterKV."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.engine import step
from precis.pipeline import answer
from precis.sampling import Sampler
from precis.session import Feed, Session
from precis.views import View
from precis.views.cluster import ClusterView
from precis.views.quest import QuestView
from tests.precis.build import N_CONTEXT, attached, cut, read, tokens

VIEWS: list[View] = [QuestView(budget=48, index_size=8), ClusterView(budget=48, index_size=10)]


@given(seed=st.integers(0, 500), n=st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_a_pages_bound_is_above_every_logit_in_it(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, keys = torch.randn(3, 8, generator=generator), torch.randn(n, 8, generator=generator)
    view = QuestView(budget=48, index_size=8)
    low, high = view.prepare(keys, torch.arange(n))
    bound = torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1)
    logits = query @ keys.T
    for page in range(low.shape[0]):
        assert bool((logits[:, page * 8 : page * 8 + 8] <= bound[:, page : page + 1] + 1e-5).all())
    chosen = view.select(query, keys, torch.arange(n), (low, high))
    pages = sorted(range(low.shape[0]), key=lambda page: -float(bound[:, page].max()))[:6]
    assert sorted({int(entry) // 8 for entry in chosen}) == sorted(pages)
    assert chosen.tolist() == [entry for entry in range(n) if entry // 8 in pages]


def test_clusters_are_taken_whole_from_the_best_on_and_the_last_is_cut_by_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    directions = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator), dim=-1) * 4
    labels = torch.arange(60) % 5
    keys = directions[labels] + 0.1 * torch.randn(60, 8, generator=generator)
    positions = torch.arange(0, 120, 2, dtype=torch.int32)
    view = ClusterView(budget=30, index_size=10, n_sink=16)
    centres, members = view.prepare(keys, positions)
    assert members[:8].tolist() == [-1] * 8  # positions 0 to 14
    assert len({(int(label), int(member)) for label, member in zip(labels[8:], members[8:], strict=True)}) == 5
    query = directions[3:4]
    chosen = set(view.select(query, keys, positions, (centres, members)).tolist())
    assert len(chosen) == 30
    assert set(range(8)) <= chosen
    assert {i for i in range(8, 60) if int(labels[i]) == 3} <= chosen
    second = int((query @ centres.T)[0].argsort(descending=True)[1])
    inside = [i for i in range(8, 60) if int(members[i]) == second]
    taken = [i for i in inside if i in chosen]
    logits = (query @ keys.T)[0]
    assert taken
    assert sorted(taken) == sorted(sorted(inside, key=lambda i: -float(logits[i]))[: len(taken)])


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_every_token_is_answered_over_what_was_chosen_for_it(view: View) -> None:
    model, token_ids = attached(), tokens(N_CONTEXT + 9)
    full = read(model, token_ids[:N_CONTEXT])
    session = Session.on(cut(full), view)
    whole = step(model, [Feed(session, token_ids[N_CONTEXT : N_CONTEXT + 6].tolist(), last=True)])[0]
    plain = Session.on(cut(full))
    query = token_ids[N_CONTEXT : N_CONTEXT + 6].tolist()
    torch.testing.assert_close(whole, step(model, [Feed(plain, query)])[0])  # the question reads everything
    seen = []
    for token in token_ids[N_CONTEXT + 6 :].tolist():
        before = session.tail.copy()
        found = step(model, [Feed(session, [token])])[0]
        assert {layer for layer, _ in session.seen} == {2, 3}
        keep = torch.ones(4, 2, N_CONTEXT, dtype=torch.bool)
        for (layer, head), (_, _, positions, _) in session.seen.items():
            keep[layer, head] = False
            keep[layer, head, positions.long()] = True
        assert int(keep[2:].sum(-1).max()) <= 48
        masked = Session.on(cut(full, keep.clone()))
        masked.tail = before
        torch.testing.assert_close(step(model, [Feed(masked, [token])])[0], found, atol=2e-5, rtol=0)
        seen.append(keep)
    assert any(not torch.equal(seen[0], other) for other in seen[1:])  # it does look again


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_a_budget_as_large_as_the_snapshot_changes_nothing(view: View) -> None:
    model = attached()
    snapshot = cut(read(model, tokens(N_CONTEXT)))
    query = tokens(5, seed=8).tolist()
    plain = [s.token_id for s in answer(model, snapshot, query, Sampler(), 8)]
    wide = replace(view, budget=1000)  # type: ignore[type-var]
    assert [s.token_id for s in answer(model, snapshot, query, Sampler(), 8, wide)] == plain


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_interleaved_answers_with_views_equal_isolated_ones(view: View) -> None:
    model = attached()
    snapshot = cut(read(model, tokens(N_CONTEXT)))
    queries = [tokens(5, seed=8).tolist(), tokens(4, seed=9).tolist()]
    isolated = [[s.token_id for s in answer(model, snapshot, q, Sampler(), 6, view)] for q in queries]
    running = [answer(model, snapshot, q, Sampler(), 6, view) for q in queries]
    mixed = [[s.token_id for s in pair] for pair in zip(*running, strict=True)]
    assert [list(column) for column in zip(*mixed, strict=True)] == isolated
    assert len(snapshot.indexes) == 4  # two layers of two heads, made once for both


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_heads_with_few_or_no_entries_are_read_whole(view: View) -> None:
    for n in (0, 1, 5):
        keys, positions = torch.randn(n, 8), torch.arange(n, dtype=torch.int32)
        assert view.select(torch.randn(2, 8), keys, positions, view.prepare(keys, positions)).tolist() == list(range(n))
