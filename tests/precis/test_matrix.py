"""Every policy with every codec runs on a tiny model and keeps what it must. No `if` in here."""

from __future__ import annotations

import pytest
import torch

from precis.attention.plug import attach
from precis.container import CODECS
from precis.families import Model, Rotary
from precis.full_cache import Document
from precis.pipeline import compress
from precis.policies import POLICIES
from precis.protection import check_budget
from precis.wire.presets import CODEC_NAMES, PRESETS, Compression, resolve
from tests.precis.build import N_CONTEXT, attached, read, tokens
from tests.tiny import tiny


@pytest.fixture(scope="module")
def model() -> Model:
    return attached()


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("policy", PRESETS)
def test_policy_and_codec(model: Model, policy: str, codec: str) -> None:
    ratio = {False: 1.0, True: 0.6}[PRESETS[policy].evicts]
    how = Compression(policy, ratio, codec)
    spans = ((0, 6), (145, 150))
    document = Document(tokens(N_CONTEXT), (6, 145), spans, (11, 12), ((14, 15), (16,)))
    seen: list[str] = []
    made = compress(model, Rotary(model, 512), document, how, between=lambda stage, *_: seen.append(stage))
    snapshot = made.snapshot
    assert snapshot.positions.shape[0] == 4 * 2 * check_budget(N_CONTEXT, how, spans)
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
    assert tuple(CODECS) == CODEC_NAMES


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
    document = Document(tokens(n_tokens), (0, n_tokens), (), (11, 12), ((14, 15), (16,)))
    made = compress(model, Rotary(model, 512), document, Compression(policy, 1.0, "int4"))
    assert made.snapshot.positions.shape[0] == 8 * n_tokens
