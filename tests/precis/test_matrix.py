"""Every policy with every codec runs on a tiny model and keeps what it must. No `if` in here."""

from __future__ import annotations

import pytest
import torch

from precis.attention.plug import attach
from precis.container import codecs_of
from precis.families import Model, Rotary
from precis.full_cache import Document
from precis.pipeline import compress
from precis.policies import POLICIES, VIEWS
from precis.protection import check_budget
from precis.wire.presets import CODEC_NAMES, PRESETS, VIEW_NAMES, Compression, resolve
from tests.precis.build import N_CONTEXT, asked, attached, read, tokens, with_tables
from tests.tiny import tiny

PROBES = ((21, 22, 23), (24,))


_PAIRS = [(policy, "int4") for policy in PRESETS] + [
    (policy, codec) for policy in ("full", "sage", "kvzip") for codec in CODEC_NAMES if codec != "int4"
]


@pytest.mark.parametrize(("policy", "codec"), _PAIRS)
def test_policy_and_codec(model: Model, policy: str, codec: str) -> None:
    ratio = {False: 1.0, True: 0.9}[PRESETS[policy].evicts]
    how = asked(model, policy, ratio, codec)
    spans = ((0, 6), (145, 150))
    document = Document(tokens(N_CONTEXT), (6, 145), spans, (11, 12), ((14, 15), (16,)), PROBES)
    seen: list[str] = []
    made = compress(model, Rotary(model, 512), document, how, between=lambda stage, *_: seen.append(stage))
    snapshot = made.snapshot
    kept, budget = snapshot.positions.shape[0], 4 * 2 * check_budget(N_CONTEXT, how, spans)
    assert {False: kept == budget, True: kept <= budget}[PRESETS[policy].finds_budget]
    for layer in range(4):
        for head in range(2):
            start, stop = snapshot.bounds(layer, head)
            positions = snapshot.positions[start:stop]
            assert bool((positions[1:] > positions[:-1]).all())
            assert {*range(6), *range(145, 150)} <= set(positions.tolist())
    assert snapshot.header.next_position == N_CONTEXT
    assert bool(torch.isfinite(snapshot.keys).all())
    assert made.fidelity.n_tokens == 127
    assert 0 <= made.fidelity.top1_agreement <= 1
    assert seen[0] == "prefill"
    assert made.packed.n_bytes > 0


def test_presets_policies_and_codecs_have_the_same_names() -> None:
    assert list(POLICIES) == list(PRESETS)
    assert tuple(codecs_of(attached())) == CODEC_NAMES
    assert tuple(VIEWS) == VIEW_NAMES
    for name, preset in PRESETS.items():
        nested = POLICIES[name].nested is not None and preset.evicts and not preset.window_share
        assert preset.nested == nested, name


@pytest.mark.parametrize("policy", POLICIES)
def test_the_observed_window_is_protected(policy: str) -> None:
    for need in POLICIES[policy].needs:
        assert getattr(need, "n_window", 0) <= max(1, PRESETS[policy].n_window)


def test_a_full_snapshot_in_raw16_is_almost_exact(model: Model) -> None:
    document = Document(tokens(N_CONTEXT), (0, N_CONTEXT), (), (11, 12), ((14, 15), (16,)))
    made = compress(model, Rotary(model, 512), document, resolve("full", None, "raw16"))
    assert made.fidelity.kl < 1e-6
    assert made.fidelity.top1_agreement == 1.0
    assert made.raw_bytes == N_CONTEXT * 4 * 2 * 12 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_own_numbers(dtype: torch.dtype) -> None:
    model = attach(tiny().to(dtype))
    document = Document(tokens(N_CONTEXT), (0, N_CONTEXT), (), (11, 12), ((14, 15), (16,)))
    made = compress(model, Rotary(model, 512), document, resolve("full", None, "raw16"))
    full = read(model, tokens(N_CONTEXT), chunk=512)
    assert made.snapshot.keys.dtype == dtype
    assert torch.equal(made.snapshot.keys.reshape(full.keys.shape), full.keys)
    assert made.fidelity.kl < 1e-3
    evicted = compress(model, Rotary(model, 512), document, resolve("kvzip", 0.5, "int4"))
    assert bool(torch.isfinite(evicted.snapshot.keys).all())


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 40, 70])
@pytest.mark.parametrize("policy", PRESETS)
def test_contexts_shorter_than_any_window_keep_everything_when_asked_to(
    model: Model, policy: str, n_tokens: int
) -> None:
    document = Document(tokens(n_tokens), (0, n_tokens), (), (11, 12), ((14, 15), (16,)), PROBES)
    made = compress(model, Rotary(model, 512), document, Compression(policy, 1.0, "int4"))
    kept = made.snapshot.positions.shape[0]
    assert {False: kept == 8 * n_tokens, True: kept <= 8 * n_tokens}[PRESETS[policy].finds_budget]


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(3, 3), (4, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("policy", PRESETS)
def test_groups_of_any_size(policy: str, n_heads: int, n_kv_heads: int) -> None:
    heads = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": 12, "hidden_size": 84}
    grouped = attached("llama", num_hidden_layers=2, **heads)
    document = Document(tokens(150), (0, 150), (), (11, 12), ((14, 15), (16,)), PROBES)
    how = Compression(policy, {False: 1.0, True: 0.9}[PRESETS[policy].evicts], "raw16")
    made = compress(grouped, Rotary(grouped, 512), document, how)
    kept, budget = made.snapshot.positions.shape[0], 2 * n_kv_heads * check_budget(150, how, ())
    assert {False: kept == budget, True: 0 < kept <= budget}[PRESETS[policy].finds_budget]


@pytest.mark.parametrize("policy", PRESETS)
def test_half_precision_caches_give_one_selection_however_they_are_read(policy: str) -> None:
    """bfloat16 ties: the same document always gives the same entries."""
    model = with_tables(attach(tiny().to(torch.bfloat16)))
    document = Document(tokens(N_CONTEXT), (0, N_CONTEXT), (), (11, 12), ((14, 15), (16,)), PROBES)
    how = Compression(policy, {False: 1.0, True: 0.9}[PRESETS[policy].evicts], "raw16")
    once, again = (compress(model, Rotary(model, 512), document, how).packed for _ in range(2))
    assert once == again


@pytest.mark.parametrize("policy", PRESETS)
def test_sliding_layers_are_left_alone(policy: str) -> None:
    model = attached("gemma3")
    document = Document(tokens(N_CONTEXT), (0, N_CONTEXT), (), (11, 12), ((14, 15), (16,)), PROBES)
    how = Compression(policy, {False: 1.0, True: 0.9}[PRESETS[policy].evicts], "raw16")
    made = compress(model, Rotary(model, 512), document, how)
    counts = (made.snapshot.offsets[1:] - made.snapshot.offsets[:-1]).reshape(4, 2)
    assert set(counts[[0, 1, 3]].flatten().tolist()) == {39}  # a window of 40, counting the query itself
    assert int(counts[2].sum()) <= 2 * check_budget(N_CONTEXT, how, ())
