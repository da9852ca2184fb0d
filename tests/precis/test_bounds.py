"""Budgets by bytes and by divergence, searched for."""

from __future__ import annotations

import pytest

from precis.errors import BoundNotReached, BudgetTooSmall
from precis.families import Model, Rotary
from precis.pipeline import compress
from precis.wire.presets import resolve
from tests.precis.build import N_CONTEXT, attached, document, tokens


@pytest.fixture(scope="module")
def model() -> Model:
    return attached()


@pytest.mark.parametrize("policy", ["kvzip", "sage", "snapkv"])
@pytest.mark.parametrize("codec", ["raw16", "int4"])
def test_max_bytes_keeps_as_much_as_fits(model: Model, policy: str, codec: str) -> None:
    rotary, asked = Rotary(model, 512), document(tokens(N_CONTEXT))
    everything = compress(model, rotary, asked, resolve(policy, 1.0, codec)).packed.n_bytes
    limit = int(everything * 0.8)
    made = compress(model, rotary, asked, resolve(policy, codec=codec, max_bytes=limit))
    assert made.packed.n_bytes <= limit
    per_head = made.snapshot.positions.shape[0] // 8
    more = compress(model, rotary, asked, resolve(policy, (per_head + 2) / N_CONTEXT, codec))
    assert more.packed.n_bytes > limit


def test_max_bytes_below_the_protected_tokens_is_refused_with_what_they_take(model: Model) -> None:
    with pytest.raises(BudgetTooSmall, match=r"the tokens that are always kept take [0-9]+ bytes"):
        compress(model, Rotary(model, 512), document(tokens(N_CONTEXT)), resolve("snapkv", max_bytes=2000))


def test_max_kl_keeps_little_and_stays_within_what_was_measured(model: Model) -> None:
    rotary, asked = Rotary(model, 512), document(tokens(N_CONTEXT))
    half = compress(model, rotary, asked, resolve("kvzip", 0.5, "raw16"))
    limit = half.fidelity.kl * 1.5
    stages: list[str] = []
    how = resolve("kvzip", codec="raw16", max_kl=limit)
    made = compress(model, rotary, asked, how, between=lambda stage, *_: stages.append(stage))
    assert made.fidelity.kl <= limit
    assert made.snapshot.positions.shape[0] < 8 * N_CONTEXT * 0.7
    assert stages.count("search") > 3
    assert stages.index("search") > stages.index("score")


def test_a_bound_below_the_codec_is_refused_with_what_the_codec_costs(model: Model) -> None:
    with pytest.raises(BoundNotReached, match="the codec int4 alone diverges by"):
        compress(model, Rotary(model, 512), document(tokens(N_CONTEXT)), resolve("kvzip", codec="int4", max_kl=1e-9))


def test_max_kl_may_keep_nothing_but_what_is_protected(model: Model) -> None:
    made = compress(model, Rotary(model, 512), document(tokens(N_CONTEXT)), resolve("kvzip", codec="raw16", max_kl=100))
    assert made.snapshot.positions.shape[0] <= 8 * 6
