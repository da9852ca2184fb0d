"""The engine computes what plain transformers computes; eviction equals a mask."""

from __future__ import annotations

import pytest
import torch

from precis.engine import step
from precis.families import Rotary
from precis.fidelity import full_logits
from precis.pipeline import answer, compress
from precis.sampling import Sampler
from precis.session import Feed, Session
from precis.wire.presets import resolve
from tests.precis.build import N_CONTEXT, attached, cut, document, read, tokens
from tests.precis.reference import MaskedModel
from tests.tiny import FAMILIES, tiny

TOLERANCE = 2e-5  # float32, logits of about 10


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_ratio_one_gives_the_logits_of_plain_transformers(family: str) -> None:
    token_ids = tokens(N_CONTEXT + 10)
    with torch.inference_mode():
        expected = tiny(family)(input_ids=token_ids[None], use_cache=False).logits[0]
    model = attached(family)
    session = Session.on(cut(read(model, token_ids[:N_CONTEXT])))
    found = [step(model, [Feed(session, token_ids[N_CONTEXT : N_CONTEXT + 7].tolist(), all_logits=True)])[0]]
    found += [step(model, [Feed(session, [int(token)])])[0] for token in token_ids[N_CONTEXT + 7 :]]
    torch.testing.assert_close(torch.cat(found), expected[N_CONTEXT:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_ratio_one_and_raw16_give_the_greedy_tokens_of_plain_transformers(family: str) -> None:
    token_ids = tokens(N_CONTEXT + 5)
    plain = tiny(family)
    expected = plain.generate(
        token_ids[None],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        attention_mask=torch.ones(1, N_CONTEXT + 5),
    )
    model = attached(family)
    made = compress(model, Rotary(model, 512), document(token_ids[:N_CONTEXT]), resolve("full", None, "raw16"))
    found = answer(model, made.snapshot, token_ids[N_CONTEXT:].tolist(), Sampler(), 12)
    assert [sampled.token_id for sampled in found] == expected[0, N_CONTEXT + 5 :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_one_shot(family: str) -> None:
    model, token_ids = attached(family), tokens(N_CONTEXT)
    whole, chunked = read(model, token_ids, chunk=N_CONTEXT), read(model, token_ids, chunk=37)
    torch.testing.assert_close(chunked.keys, whole.keys, atol=1e-5, rtol=0)
    torch.testing.assert_close(chunked.values, whole.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_eviction_equals_a_mask_on_the_dense_model(family: str) -> None:
    token_ids = tokens(N_CONTEXT + 8)
    model = attached(family)
    full = read(model, token_ids[:N_CONTEXT])
    generator = torch.Generator().manual_seed(3)
    shape = (full.geometry.n_layers, full.geometry.n_kv_heads, 1)
    share = torch.rand(shape, generator=generator)
    keep = torch.rand(*shape[:2], N_CONTEXT, generator=generator) < share
    keep[0, 0] = False  # a head that keeps nothing at all
    reference = MaskedModel(tiny(family))
    expected = reference.logits(token_ids, keep, N_CONTEXT)[N_CONTEXT:]
    untouched = reference.logits(token_ids)[N_CONTEXT:]
    assert (expected - untouched).abs().max() > 0.01  # the mask does something
    session = Session.on(cut(full, keep.clone()))
    found = step(model, [Feed(session, token_ids[N_CONTEXT:].tolist(), all_logits=True)])[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "phi3-window"])
def test_three_packed_requests_equal_each_alone(family: str) -> None:
    model = attached(family)
    first, second = cut(read(model, tokens(N_CONTEXT))), cut(read(model, tokens(90, seed=2)))
    queries = [tokens(5, seed=3).tolist(), tokens(1, seed=4).tolist(), tokens(9, seed=5).tolist()]
    snapshots = [first, first, second]
    together = [Session.on(snapshot) for snapshot in snapshots]
    packed = [step(model, [Feed(s, q) for s, q in zip(together, queries, strict=True)])]
    packed += [step(model, [Feed(s, [4 + i]) for i, s in enumerate(together)]) for _ in range(2)]
    for index, (snapshot, query) in enumerate(zip(snapshots, queries, strict=True)):
        alone = Session.on(snapshot)
        steps = [step(model, [Feed(alone, query)])[0]]
        steps += [step(model, [Feed(alone, [4 + index])])[0] for _ in range(2)]
        for found, expected in zip(packed, steps, strict=True):
            torch.testing.assert_close(found[index], expected, atol=TOLERANCE, rtol=0)


def test_a_query_in_chunks_equals_the_query_at_once() -> None:
    model, query = attached(), tokens(40, seed=6).tolist()
    snapshot = cut(read(model, tokens(N_CONTEXT)))
    whole, parts = Session.on(snapshot), Session.on(snapshot)
    expected = step(model, [Feed(whole, query)])[0]
    step(model, [Feed(parts, query[:13])])
    step(model, [Feed(parts, query[13:27])])
    torch.testing.assert_close(step(model, [Feed(parts, query[27:])])[0], expected, atol=TOLERANCE, rtol=0)


def test_a_tail_longer_than_its_first_room_stays_exact() -> None:
    model, token_ids = attached(), tokens(20 + 400)
    session = Session.on(cut(read(model, token_ids[:20])))
    step(model, [Feed(session, token_ids[20:270].tolist())])
    found = step(model, [Feed(session, token_ids[270:].tolist())])[0][-1]
    with torch.inference_mode():
        expected = tiny()(input_ids=token_ids[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_probing_leaves_the_full_cache_as_it_was() -> None:
    model = attached()
    full = read(model, tokens(N_CONTEXT))
    before = full.keys.clone(), full.values.clone()
    full_logits(model, full, tokens(20, seed=9).tolist())
    assert torch.equal(full.keys, before[0])
    assert torch.equal(full.values, before[1])


def test_answering_leaves_the_snapshot_as_it_was() -> None:
    model = attached()
    snapshot = cut(read(model, tokens(N_CONTEXT)))
    before = snapshot.keys.clone(), snapshot.values.clone(), snapshot.positions.clone()
    answers = [[s.token_id for s in answer(model, snapshot, [5, 6, 7], Sampler(), 8)] for _ in range(20)]
    assert all(found == answers[0] for found in answers)
    assert torch.equal(snapshot.keys, before[0])
    assert torch.equal(snapshot.values, before[1])
    assert torch.equal(snapshot.positions, before[2])
