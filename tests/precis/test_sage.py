"""SAGE-KV equals brute force, as a snapshot and as a view."""

from __future__ import annotations

import torch

from precis.engine import step
from precis.families import Rotary
from precis.observations.window import WindowQueries
from precis.pipeline import answer, compress
from precis.sampling import Sampler
from precis.session import Feed, Session
from precis.views.sage import SageView
from precis.wire.presets import resolve
from tests.precis.build import N_CONTEXT, attached, cut, document, read, tokens
from tests.precis.reference import MaskedModel
from tests.tiny import tiny


def test_snapshot_keeps_sinks_recent_and_the_best_logits_of_the_last_token() -> None:
    model, token_ids = attached(), tokens(N_CONTEXT)
    made = compress(model, Rotary(model, 512), document(token_ids), resolve("sage", 0.4, "raw16"))
    full = read(model, token_ids, WindowQueries(1))
    queries = full.seen(WindowQueries(1))
    budget, n_sink = 60, 4
    n_recent = budget // 2 - n_sink
    for layer in range(4):
        for head in range(2):
            pair = queries[layer, 2 * head : 2 * head + 2, 0]
            logits = (pair @ full.keys[layer, head].T).sum(0)
            middle = range(n_sink, N_CONTEXT - n_recent)
            best = sorted(middle, key=lambda i: -float(logits[i]))[: budget - n_sink - n_recent]
            expected = sorted([*range(n_sink), *best, *range(N_CONTEXT - n_recent, N_CONTEXT)])
            start, stop = made.snapshot.bounds(layer, head)
            assert made.snapshot.positions[start:stop].tolist() == expected


def test_view_chooses_what_brute_force_chooses() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(3, 8, generator=generator), torch.randn(50, 8, generator=generator)
    positions = torch.arange(0, 100, 2, dtype=torch.int32)
    chosen = SageView(budget=20, n_sink=4).select(query, keys, positions, ()).tolist()
    sinks, recent = [0, 1], list(range(50 - 6, 50))
    logits = (query @ keys.T).sum(0)
    middle = sorted(range(2, 44), key=lambda i: -float(logits[i]))[: 20 - len(sinks) - len(recent)]
    assert chosen == sorted([*sinks, *middle, *recent])


def test_view_of_a_small_snapshot_is_all_of_it() -> None:
    chosen = SageView(budget=20).select(torch.randn(1, 8), torch.randn(12, 8), torch.arange(12, dtype=torch.int32), ())
    assert chosen.tolist() == list(range(12))


def test_decoding_with_a_view_equals_a_mask_on_the_dense_model() -> None:
    token_ids = tokens(N_CONTEXT + 9)
    model = attached()
    session = Session.on(cut(read(model, token_ids[:N_CONTEXT])), SageView(budget=40))
    query = token_ids[N_CONTEXT : N_CONTEXT + 6].tolist()
    whole = step(model, [Feed(session, query, last=True)])[0]
    keep = torch.zeros(4, 2, N_CONTEXT, dtype=torch.bool)
    for (layer, head), (_, _, positions, _) in session.seen.items():
        keep[layer, head, positions.long()] = True
    assert keep.sum(-1).eq(40).all()
    reference = MaskedModel(tiny())
    expected = reference.logits(token_ids[: N_CONTEXT + 6])[-1:]
    torch.testing.assert_close(whole, expected, atol=2e-5, rtol=0)  # the query itself reads everything
    asked = session.tail.copy()
    found = [step(model, [Feed(session, [int(t)])])[0] for t in token_ids[N_CONTEXT + 6 :]]
    alone = Session.on(cut(read(model, token_ids[:N_CONTEXT])))
    step(model, [Feed(alone, query)])
    unseen = [step(model, [Feed(alone, [int(t)])])[0] for t in token_ids[N_CONTEXT + 6 :]]
    assert max(float((a - b).abs().max()) for a, b in zip(found, unseen, strict=True)) > 0.01
    # a dense run whose rows after the query are masked, on top of the query's unmasked keys and values
    masked = cut(read(model, token_ids[:N_CONTEXT]), keep)
    kept = Session.on(masked)
    kept.tail = asked
    again = [step(model, [Feed(kept, [int(t)])])[0] for t in token_ids[N_CONTEXT + 6 :]]
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_interleaved_queries_with_views_equal_isolated_ones() -> None:
    model = attached()
    snapshot = cut(read(model, tokens(N_CONTEXT)))
    view = SageView(budget=32)
    queries = [tokens(5, seed=8).tolist(), tokens(4, seed=9).tolist()]
    isolated = [[s.token_id for s in answer(model, snapshot, q, Sampler(), 6, view)] for q in queries]
    running = [answer(model, snapshot, q, Sampler(), 6, view) for q in queries]
    mixed = [[s.token_id for s in pair] for pair in zip(*running, strict=True)]
    assert [list(column) for column in zip(*mixed, strict=True)] == isolated
