"""Methods that kvpress has not, and observations, against brute force on small models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from precis.attention.dense import Maxima, raise_maxima
from precis.core import Geometry, Prefill
from precis.families import Model, Rotary
from precis.full_cache import Document
from precis.observations.columns import ColumnSums
from precis.observations.fisher import GradientStore, RepeatGradients, draw
from precis.observations.metric import RepeatMetric
from precis.observations.norms import OutputNorms
from precis.observations.probes import ProbeAttention
from precis.observations.repeat import RepeatAttention, repetitions
from precis.observations.window import WindowQueries
from precis.prefill import prefill
from precis.scorers.blend import Blend
from precis.scorers.corm import Corm
from precis.scorers.defensive import Defensive as DefensiveScorer
from precis.scorers.fisher import Fisher
from precis.scorers.kvzip import KVzip
from precis.scorers.lagkv import LagKV
from precis.scorers.probing import Probing
from precis.scorers.random_ import Random
from precis.scorers.snapkv import SnapKV
from precis.selectors.cascade import Cascade
from precis.selectors.defensive import Defensive
from tests.precis.build import N_CONTEXT, attached, document, read, tokens
from tests.tiny import FAMILIES, tiny

N_WINDOW = 16


@pytest.fixture(scope="module")
def full(model: Model) -> Prefill:
    return read(model, tokens(N_CONTEXT), WindowQueries(N_WINDOW), OutputNorms(), OutputNorms(2), ColumnSums())


def window_weights(full: Prefill, layer: int) -> Tensor:
    """[K, G, W, T] softmax of the window's rows over everything before them, spelled out."""
    queries = full.seen(WindowQueries(N_WINDOW))[layer].reshape(2, 2, N_WINDOW, 12)
    logits = queries @ full.keys[layer][:, None].transpose(-1, -2) / 12**0.5
    later = torch.arange(N_CONTEXT) > torch.arange(N_CONTEXT - N_WINDOW, N_CONTEXT)[:, None]
    return logits.masked_fill(later, float("-inf")).softmax(-1)


def test_output_norms_equal_the_projection_spelled_out(model: Model, full: Prefill) -> None:
    for layer in (0, 3):
        weight = model.attentions[layer].o_proj.weight  # type: ignore[union-attr]
        for head in range(4):
            projected = full.values[layer, head // 2] @ weight[:, head * 12 : (head + 1) * 12].T  # type: ignore[index]
            torch.testing.assert_close(full.seen(OutputNorms(1))[layer, head], projected.abs().sum(-1))
            torch.testing.assert_close(full.seen(OutputNorms(2))[layer, head], projected.norm(dim=-1))


@pytest.mark.parametrize("chunk", [37, N_CONTEXT])
def test_column_sums_equal_the_whole_attention_matrix(model: Model, chunk: int) -> None:
    hf = tiny()
    with torch.inference_mode():
        matrices = hf(input_ids=tokens(N_CONTEXT)[None], output_attentions=True).attentions
    found = read(model, tokens(N_CONTEXT), ColumnSums(), ColumnSums(mean=True), chunk=chunk)
    expected = torch.stack([matrix[0].sum(-2) for matrix in matrices])
    torch.testing.assert_close(found.seen(ColumnSums()), expected, atol=1e-5, rtol=1e-4)
    seen_by = torch.arange(N_CONTEXT, 0, -1)
    torch.testing.assert_close(found.seen(ColumnSums(mean=True)), expected / seen_by, atol=1e-6, rtol=1e-4)


def test_corm_counts_what_any_late_row_and_head_finds_more_than_evenly_interesting(full: Prefill) -> None:
    scores = Corm(N_WINDOW).score(full)
    visible = torch.arange(N_CONTEXT - N_WINDOW + 1, N_CONTEXT + 1)[:, None]
    for layer in range(4):
        kept = (window_weights(full, layer) >= 1 / visible).any(1).any(1)[:, : N_CONTEXT - N_WINDOW]
        assert torch.equal(scores[layer, :, : N_CONTEXT - N_WINDOW] >= 1, kept)


def test_defensive_scores_and_stages_equal_their_definition(full: Prefill) -> None:
    scorer, selector = DefensiveScorer(N_WINDOW, 5), Defensive(N_WINDOW, 0.6)
    scores, n_seen, budget = scorer.score(full), N_CONTEXT - N_WINDOW, 60
    protected = (torch.arange(N_CONTEXT) < 4) | (torch.arange(N_CONTEXT) >= n_seen)
    keep = selector.select(full, scores, torch.full((4, 2), budget), protected)
    assert bool((keep.sum(-1) == budget).all())
    norms = full.seen(OutputNorms()).reshape(4, 2, 2, N_CONTEXT).mean(2)
    relative = norms / norms.sum(1, keepdim=True)
    for layer in range(4):
        weights = window_weights(full, layer)
        for head in range(2):
            worst = torch.zeros(n_seen)
            for row in weights[head, ..., :n_seen].reshape(-1, n_seen):
                pooled = functional.avg_pool1d(row[None], 5, 1, 2)[0]
                worst = torch.maximum(worst, pooled * row.sum() / pooled.sum())
            worst = worst.clamp_min(worst.mean())
            torch.testing.assert_close(scores[layer, head, :n_seen], worst * relative[layer, head, :n_seen])
            mean = weights[head].mean((0, 1))
            chosen = {*range(4), *range(n_seen, N_CONTEXT)}
            for token in sorted(range(4, n_seen), key=lambda t: -float(mean[t])):
                if sum(float(mean[t]) for t in chosen) >= 0.6 or len(chosen) == budget:
                    break
                chosen.add(token)
            rest = sorted(set(range(n_seen)) - chosen, key=lambda t: -float(scores[layer, head, t]))
            chosen |= set(rest[: budget - len(chosen)])
            assert chosen == set(keep[layer, head].nonzero()[:, 0].tolist())


def test_the_cascade_reaches_further_back_the_sparser_it_gets() -> None:
    n_tokens, budget = 400, 44
    protected = torch.arange(n_tokens) < 4
    flat = torch.zeros(1, 2, n_tokens)
    keep = Cascade().select(None, flat, torch.full((1, 2), budget), protected)[0]  # type: ignore[arg-type]
    assert keep.sum(-1).tolist() == [budget, budget]
    assert torch.equal(keep[0], keep[1])
    kept = keep[0].nonzero()[4:, 0]
    newest, gaps = kept[-10:], kept.diff()
    assert newest.tolist() == list(range(390, 400))
    assert float(gaps[-15:].float().mean()) < float(gaps[:15].float().mean())
    assert int(kept[0]) < 360  # a plain window of 40 would begin there
    scores = flat.clone()
    scores[..., 100] = 1.0
    preferred = Cascade().select(None, scores, torch.full((1, 2), budget), protected)[0, 0]  # type: ignore[arg-type]
    assert int((preferred != keep[0]).sum()) <= 2


def test_short_contexts_fit_into_the_cascade_whole() -> None:
    keep = Cascade().select(None, torch.zeros(1, 1, 9), torch.tensor([[9]]), torch.arange(9) < 2)  # type: ignore[arg-type]
    assert bool(keep.all())


def test_lagkv_survives_channels_that_are_constant(full: Prefill) -> None:
    values = full.values.clone()
    values[..., 3] = 0.5
    scores = LagKV(lag=16).score(replace(full, values=values))
    assert bool(torch.isfinite(scores).all())
    assert bool((scores[..., -16:] == 1).all())


def test_blend_is_the_largest_of_scaled_scores_and_keeps_the_narrowest_promise(full: Prefill) -> None:
    scorer = Blend((SnapKV(N_WINDOW), Random(1)), (2.0, 1.0))
    snap, chance = SnapKV(N_WINDOW).score(full), Random(1).score(full)
    n_best = int(0.1 * snap.numel())
    scaled = [part * weight / part.flatten().topk(n_best).values.mean() for part, weight in ((snap, 2), (chance, 1))]
    torch.testing.assert_close(scorer.score(full), torch.maximum(*scaled))
    assert scorer.comparable == "layer"
    assert scorer.kind == "other"
    assert scorer.needs == {WindowQueries(N_WINDOW)}
    with pytest.raises(ValueError, match="one weight per part"):
        Blend((Random(),), ())


def probed(token_ids: Tensor, *probes: tuple[int, ...]) -> Document:
    return replace(document(token_ids), probes=probes)


def test_probes_record_the_largest_attention_of_question_and_greedy_answer() -> None:
    token_ids, probe, n_answer = tokens(N_CONTEXT), tokens(9, seed=5), 4
    hf = tiny()
    ids = torch.cat([token_ids, probe])
    with torch.inference_mode():
        for _ in range(n_answer):
            ids = torch.cat([ids, hf(input_ids=ids[None]).logits[0, -1:].argmax(-1)])
        matrices = hf(input_ids=ids[None], output_attentions=True).attentions
    expected = torch.stack([matrix[0, :, N_CONTEXT:, :N_CONTEXT].amax(1) for matrix in matrices])
    model = attached()
    full = prefill(model, Rotary(model, 512), probed(token_ids, tuple(probe.tolist())), [ProbeAttention(n_answer)])
    torch.testing.assert_close(full.seen(ProbeAttention(n_answer)), expected, atol=1e-5, rtol=1e-4)


def test_several_probes_are_as_the_best_of_each_alone() -> None:
    model, token_ids = attached(), tokens(N_CONTEXT)
    one, other = tuple(tokens(7, seed=8).tolist()), tuple(tokens(11, seed=9).tolist())
    rotary = Rotary(model, 512)
    alone = [
        Probing(3).score(prefill(model, rotary, probed(token_ids, probe), Probing(3).needs)) for probe in (one, other)
    ]
    both = Probing(3).score(prefill(model, rotary, probed(token_ids, one, other), Probing(3).needs))
    torch.testing.assert_close(both, torch.maximum(*alone))
    nothing = Probing(3).score(prefill(model, rotary, document(token_ids), Probing(3).needs))
    assert not bool(nothing.any())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_repeat_gradients_equal_autograd_through_the_whole_cache(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    """The reference differentiates plain attention over a cache whose values are leaves, one forward per step."""
    model, token_ids = attached(), tokens(60)
    model = replace(model, geometry=replace(model.geometry, softcap=(softcap,) * 4))
    monkeypatch.setattr("precis.observations.fisher.FORWARD", 25)
    monkeypatch.setattr("precis.observations.fisher._LOGITS", 1)
    asked = document(token_ids)
    full = prefill(model, Rotary(model, 512), asked, [RepeatGradients(seed=3), RepeatAttention()])
    found = full.seen(RepeatGradients(seed=3))
    attention = full.seen(RepeatAttention())
    torch.testing.assert_close(found[:, :4], attention[:, :4], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[:, 6:], attention[:, 4:], atol=1e-6, rtol=1e-4)
    ((at, stop, said),) = list(repetitions(asked, model.geometry))
    assert (at, stop) == (0, 60)
    generator = torch.Generator().manual_seed(3)
    expected = torch.zeros(4, 2, 60)
    leaves = full.values.clone().requires_grad_()
    for start in range(0, len(said), 25):
        part = said[start : start + 25]
        store = LeafStore(full.keys, leaves, said[:start], model)
        positions = torch.arange(60 + start, 60 + start + len(part))[None]
        out = model.hf(input_ids=part[None], position_ids=positions, use_cache=False, kv_store=store)
        logs = out.logits[0].log_softmax(-1)
        sampled = draw(logs.detach(), generator)
        (gradient,) = torch.autograd.grad(logs.gather(1, sampled).sum(), leaves)
        expected += gradient.square().sum(-1)
    torch.testing.assert_close(found[:, 4:6], expected / len(said), rtol=1e-3, atol=1e-9)


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": _YARN}], ids=["plain", "yarn"])
def test_the_metric_is_that_of_autograd_through_keys_before_rope(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, token_ids = attached(**changes), tokens(60)
    g, rotary = model.geometry, Rotary(model, 512)
    monkeypatch.setattr("precis.observations.fisher.FORWARD", 25)
    asked = document(token_ids)
    full = prefill(model, rotary, asked, [RepeatMetric(seed=3)])
    found = full.seen(RepeatMetric(seed=3))
    ((_, _, said),) = list(repetitions(asked, g))
    positions = torch.arange(60).repeat(g.n_kv_heads)
    flat = [rotary.undo(layer, full.keys[layer].flatten(0, 1), positions) for layer in range(4)]
    keys, values = torch.stack(flat).requires_grad_(), full.values.clone().requires_grad_()
    generator = torch.Generator().manual_seed(3)
    expected = torch.zeros_like(found)
    for start in range(0, len(said), 25):
        part = said[start : start + 25]
        turned = torch.stack([rotary.redo(layer, keys[layer], positions) for layer in range(4)])
        store = LeafStore(turned.view(full.keys.shape), values, said[:start], model)
        places = torch.arange(60 + start, 60 + start + len(part))[None]
        logs = model.hf(input_ids=part[None], position_ids=places, use_cache=False, kv_store=store).logits[0]
        logs = logs.log_softmax(-1)
        chosen = logs.gather(1, draw(logs.detach(), generator)).sum()
        for kind, gradient in enumerate(torch.autograd.grad(chosen, (keys, values))):
            later = gradient.view(values.shape)[:, :, 4:]
            expected[:, kind] += later.transpose(-1, -2) @ later
    torch.testing.assert_close(found, expected / (len(said) * 56), rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_see_the_same_attention_as_the_repetition_alone(family: str) -> None:
    model = attached(family)
    full = prefill(model, Rotary(model, 512), document(tokens(60)), [RepeatGradients(), RepeatAttention()])
    n_heads, n_kv_heads = model.geometry.n_heads, model.geometry.n_kv_heads
    found, attention = full.seen(RepeatGradients()), full.seen(RepeatAttention())
    torch.testing.assert_close(found[:, :n_heads], attention[:, :n_heads], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found[:, n_heads + n_kv_heads :], attention[:, n_heads:], atol=1e-5, rtol=1e-3)
    evicting = [layer for layer in range(4) if model.geometry.evicts(layer, 60)]
    assert bool((found[evicting, n_heads:].sum(-1) > 0).all())


@pytest.mark.parametrize("span", [(0, 50), (10, 30)])
def test_squares_are_summed_over_the_rows_of_a_softmax_over_the_span(span: tuple[int, int]) -> None:
    weights = torch.randn(2, 3, 7, 60, generator=torch.Generator().manual_seed(0)).softmax(-1)
    counted = torch.zeros(60, dtype=torch.bool)
    counted[:4] = counted[span[0] : span[1]] = counted[50:] = True
    alone = (weights * counted) / (weights * counted).sum(-1, keepdim=True)
    best, squares = torch.zeros(2, 6, span[1] - span[0])
    raise_maxima(Maxima(span, 4, 50, best, None, squares), weights.clone(), None)
    expected = alone[..., span[0] : span[1]].flatten(0, 1)
    torch.testing.assert_close(best, expected.amax(1))
    torch.testing.assert_close(squares, expected.square().sum(1))


def test_capped_logits_are_differentiated_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all probability on nothing in particular, and so no gradient, if the cap were left out of account."""
    plain, capped = attached("gemma2"), attached("gemma2", final_logit_softcapping=1e-3)
    asked = document(tokens(60))
    n_heads = plain.geometry.n_heads
    sums = []
    for model in (plain, capped):
        found = prefill(model, Rotary(model, 512), asked, [RepeatGradients()]).seen(RepeatGradients())
        sums.append(float(found[:, n_heads : n_heads + plain.geometry.n_kv_heads].sum()))
    assert sums[1] < sums[0] * 1e-3


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logs = torch.tensor([0.5, 0.25, 0.0, 0.25]).log().expand(20_000, 4)
    drawn = draw(logs, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn[:, 0], minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.0, 0.25]), atol=0.015, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_backward_pass_of_attention_equals_autograd(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, window: int | None, with_sinks: bool
) -> None:
    monkeypatch.setattr("precis.observations.fisher._LOGITS", 1)
    generator = torch.Generator().manual_seed(0)
    n_context, n, dim = 8, 20, 6
    context = torch.randn(2, 1, 2, n_context, dim, generator=generator)
    query, key, value = (torch.randn(h, n, dim, generator=generator).requires_grad_() for h in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    geometry = Geometry(1, 4, 2, dim, 64, (window,), (0.7,), (softcap,))
    store = GradientStore(Prefill(geometry, context[0], context[1]), (0, n_context), torch.zeros(1, 6, n_context))
    weight = torch.randn(4, n, dim, generator=generator)
    found = torch.autograd.grad((store.attend(0, query, key, value, sinks) * weight).sum(), (query, key, value))
    keys = torch.cat([context[0, 0], key], 1).repeat_interleave(2, 0)
    values = torch.cat([context[1, 0], value], 1).repeat_interleave(2, 0)
    logits = 0.7 * query @ keys.transpose(1, 2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    rows, columns = torch.arange(n_context, n_context + n)[:, None], torch.arange(n_context + n)
    hidden = (columns > rows) | (columns <= rows - (window or 99))
    extra = torch.full((4, 1), float("-inf")) if sinks is None else sinks[:, None]
    logits = torch.cat([logits.masked_fill(hidden, float("-inf")), extra[:, None].expand(4, n, 1)], -1)
    expected = torch.autograd.grad(((logits.softmax(-1)[..., :-1] @ values) * weight).sum(), (query, key, value))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


class LeafStore:
    """Context values that can be differentiated, and earlier repeated tokens as constants."""

    def __init__(self, keys: Tensor, values: Tensor, earlier: Tensor, model: Model) -> None:
        self.keys, self.values, self.tail = keys, values, {}
        self.softcap, self.model = model.geometry.softcap[0], model
        if len(earlier):
            with torch.no_grad():
                positions = torch.arange(60, 60 + len(earlier))
                store = LeafStore(keys, values.detach(), earlier[:0], model)
                model.decoder(input_ids=earlier[None], position_ids=positions[None], use_cache=False, kv_store=store)
                self.tail = store.new
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        self.new[layer] = (key.detach(), value.detach())
        earlier = self.tail.get(layer, (key[:, :0], value[:, :0]))
        keys = torch.cat([self.keys[layer], earlier[0], key], 1).repeat_interleave(2, 0)
        values = torch.cat([self.values[layer], earlier[1], value], 1).repeat_interleave(2, 0)
        n, m = query.shape[1], keys.shape[1]
        later = torch.arange(m) > torch.arange(m - n, m)[:, None]
        logits = query @ keys.transpose(1, 2) / 12**0.5
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.masked_fill(later, float("-inf")).softmax(-1) @ values


def test_fisher_scores_follow_their_formula_and_never_fall_below_attentions_share(full: Prefill) -> None:
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(4, 4, N_CONTEXT, generator=generator)
    information = torch.rand(4, 2, N_CONTEXT, generator=generator) ** 4
    information[:, :, 50] = 0  # the model is sure of what it copies
    seen = replace(full, observed={RepeatGradients(): torch.cat([attention, information, information], 1)})
    distance = (full.values - full.values.mean(2, keepdim=True)).square().sum(-1)
    torch.testing.assert_close(Fisher().score(seen), information * distance)
    n_best = attention[:, :2].numel() // 10
    a = attention.reshape(4, 2, 2, N_CONTEXT).amax(2)
    a = a / a.flatten().sort(descending=True).values[:n_best].mean()
    f = information * distance
    f = f / f.flatten().sort(descending=True).values[:n_best].mean()
    found = Fisher(attention=True).score(seen)
    torch.testing.assert_close(found, (a * (f + 0.1 * a**2).sqrt()).sqrt())
    torch.testing.assert_close(found[..., 50], a[..., 50] * 0.1**0.25)


def test_kvzip_plus_is_kvzip_where_norms_are_equal(full: Prefill) -> None:
    ones = torch.ones(4, 4, N_CONTEXT)
    attention = torch.rand(4, 6, N_CONTEXT, generator=torch.Generator().manual_seed(0))
    repeated = replace(
        full,
        observed={RepeatAttention(): attention, RepeatAttention(per_residual=True): attention, OutputNorms(2): ones},
    )
    assert torch.equal(KVzip().score(repeated), KVzip(plus=True).score(repeated))


def test_a_caller_in_inference_mode_gets_the_same_gradients(model: Model) -> None:
    needs = [RepeatGradients()]
    (expected,) = prefill(model, Rotary(model, 512), document(tokens(60)), needs).observed.values()
    with torch.inference_mode():
        (found,) = prefill(model, Rotary(model, 512), document(tokens(60)), needs).observed.values()
    assert torch.equal(found, expected)
