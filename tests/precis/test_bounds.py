"""Budgets by bytes and by divergence, searched for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from precis.errors import BoundNotReached, BudgetTooSmall, SnapshotCorrupt, SnapshotStale
from precis.families import Model, Rotary
from precis.pipeline import compress
from precis.reader import load
from precis.wire.presets import Compression, resolve, with_artifacts
from tests.precis.build import N_CONTEXT, document, tokens


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


def by_step(model: Model, **bounds: float) -> Compression:
    return with_artifacts(resolve(codec="tc", **bounds), model.artifacts)  # type: ignore[arg-type]


def test_tc_fills_the_bytes_that_a_ratio_or_a_limit_allows(model: Model) -> None:
    rotary, asked = Rotary(model, 512), document(tokens(N_CONTEXT))
    made = compress(model, rotary, asked, by_step(model, ratio=3))
    assert 0.9 * made.raw_bytes / 3 < made.packed.n_bytes <= made.raw_bytes / 3
    assert made.snapshot.positions.shape[0] == 8 * N_CONTEXT
    smaller = compress(model, rotary, asked, by_step(model, max_bytes=9000))
    assert 8000 < smaller.packed.n_bytes <= 9000
    assert smaller.fidelity.kl > made.fidelity.kl
    with pytest.raises(BudgetTooSmall, match="too few"):
        compress(model, rotary, asked, by_step(model, max_bytes=500))


def test_a_document_that_is_too_short_for_a_ratio_takes_what_it_needs(model: Model) -> None:
    for n_tokens in (1, 4, 6, 30):
        made = compress(model, Rotary(model, 512), document(tokens(n_tokens)), by_step(model, ratio=100))
        assert made.packed.n_bytes > made.raw_bytes / 100
        assert made.snapshot.positions.shape[0] == 8 * n_tokens


def test_tc_takes_the_coarsest_step_that_a_divergence_allows(model: Model) -> None:
    rotary, asked = Rotary(model, 512), document(tokens(N_CONTEXT))
    made = compress(model, rotary, asked, by_step(model, ratio=3))
    found = compress(model, rotary, asked, by_step(model, max_kl=made.fidelity.kl * 4))
    assert made.fidelity.kl < found.fidelity.kl <= made.fidelity.kl * 4
    assert found.packed.n_bytes < made.packed.n_bytes
    with pytest.raises(BoundNotReached, match="however fine its step"):
        compress(model, rotary, asked, by_step(model, max_kl=1e-12))


def test_tc_of_a_selection_stores_what_was_kept(model: Model) -> None:
    how = with_artifacts(resolve("kvzip", 0.5, "tc", ratio=5), model.artifacts)
    made = compress(model, Rotary(model, 512), document(tokens(N_CONTEXT)), how)
    assert made.snapshot.positions.shape[0] == 8 * N_CONTEXT // 2
    assert made.packed.n_bytes <= made.raw_bytes / 5


def test_another_transform_than_was_asked_for_is_not_used(model: Model) -> None:
    assert model.transform is not None
    other = replace(model, transform=replace(model.transform, fingerprint="beef"))
    rotary, asked, how = Rotary(model, 512), document(tokens(N_CONTEXT)), by_step(model, ratio=3)
    with pytest.raises(SnapshotStale, match="not the model's"):
        compress(other, rotary, asked, how)
    made = compress(model, rotary, asked, how)
    with pytest.raises(SnapshotStale, match="another transform"):
        load(other, rotary, made.packed, made.snapshot.header.fingerprint)
    without = replace(model, transform=None)
    with pytest.raises(SnapshotCorrupt, match="does not fit"):
        load(without, rotary, made.packed, made.snapshot.header.fingerprint)
