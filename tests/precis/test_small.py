"""Sampling, fingerprints, protection, presets, errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precis import errors
from precis.fingerprint import digest, of_context
from precis.protection import budget_per_head, check_budget, protected_spans
from precis.sampling import Sampler
from precis.wire.presets import Compression, resolve, with_artifacts

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


def test_greedy_takes_the_largest_and_reports_its_logprob() -> None:
    sampled = Sampler(n_top=2).sample(LOGITS)
    assert sampled.token_id == 1
    assert sampled.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[1]))
    assert [token for token, _ in sampled.top] == [1, 2]


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(temperature=1.0, seed=seed)
        return [sampler.sample(torch.zeros(50)).token_id for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(temperature=1.0, seed=0)
    counts = torch.bincount(torch.tensor([sampler.sample(LOGITS).token_id for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, LOGITS.softmax(-1), atol=0.03, rtol=0)


def test_top_p_never_draws_from_the_tail() -> None:
    sampler = Sampler(temperature=1.0, top_p=0.6, seed=0)
    assert {sampler.sample(LOGITS).token_id for _ in range(200)} == {1}
    assert Sampler(temperature=1.0, top_p=1e-9, seed=0).sample(LOGITS).token_id == 1


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        Sampler().sample(torch.tensor([0.0, float("nan")]))


@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), st.text(max_size=3), max_size=3).filter(bool), st.data())
def test_different_fields_never_share_a_digest(fields: dict[str, str], data: st.DataObject) -> None:
    other = data.draw(st.dictionaries(st.text("ab", min_size=1, max_size=2), st.text(max_size=3), max_size=3))
    assert (digest(**fields) == digest(**other)) == (fields == other)


def test_a_number_and_its_text_are_different_fields() -> None:
    assert digest(x=1) != digest(x="1") != digest(x=b"1")


def test_the_context_fingerprint_is_the_same_in_every_process() -> None:
    policy: dict[str, str | int | float] = {"policy": "kvzip", "keep_ratio": 0.25, "codec": "int4"}
    assert (
        of_context("m", b"\x01\x00\x00\x00", policy)
        == "28a80a079f242ac75bc76a1756b52d836acd74225a12654687032d229061470c"
    )


def test_protected_spans_are_clipped_and_counted_once() -> None:
    how = Compression("snapkv", 0.5, "int4")
    assert protected_spans(10, how.policy, budget_per_head(10, how), [(8, 20), (3, 3)]) == [(0, 4), (0, 10), (8, 10)]
    with pytest.raises(errors.BudgetTooSmall, match=r"at least 1\.00"):
        check_budget(10, how, [])
    assert check_budget(200, how, []) == 100


def test_a_share_of_sage_is_recent() -> None:
    assert (150 - 26, 150) in protected_spans(150, "sage", 60, [])


@pytest.mark.parametrize(
    ("policy", "ratio", "codec", "words"),
    [
        ("nope", None, None, "kvzip"),
        (None, 0.0, None, "above 0"),
        (None, 1.5, None, "at most 1"),
        (None, None, "zip", "int4"),
        ("full", 0.5, None, "keeps everything"),
        ("probes", None, None, "needs probes"),
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(
    policy: str | None, ratio: float | None, codec: str | None, words: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=words):
        resolve(policy, ratio, codec)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep_ratio": 0.5, "max_bytes": 10}, "one of keep_ratio, max_bytes and max_kl"),
        ({"max_bytes": 10, "max_kl": 0.1}, "not max_bytes and max_kl"),
        ({"max_bytes": 0}, "above 0"),
        ({"max_kl": 0.0}, "above 0"),
        ({"max_kl": float("nan")}, "above 0"),
        ({"policy": "full", "max_kl": 0.1}, "keeps everything: leave max_kl out"),
        ({"ratio": 1.0}, "above 1"),
        ({"ratio": float("inf")}, "up to 1000"),
        ({"ratio": 8, "codec": "int4"}, "one rate: leave ratio out"),
        ({"ratio": 8, "max_kl": 0.1}, "one of ratio, max_bytes and max_kl"),
        ({"ratio": 8, "policy": "full", "keep_ratio": 0.5}, "keeps everything: leave keep_ratio out"),
        ({"probes": ["Who?"]}, "asks no probes; probes and kvzip-probes do"),
        ({"policy": "probes", "probes": [" "]}, "1 to 2000 characters"),
        ({"policy": "probes", "probes": ["Who?"] * 33}, "up to 32"),
    ],
)
def test_bounds_and_probes_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=words):
        resolve(**given)


def test_bounds_and_probes_are_part_of_what_a_snapshot_is() -> None:
    kinds = [
        resolve("kvzip-probes", probes=["Who?"]),
        resolve("kvzip-probes", probes=["Who", "?"]),
        resolve("kvzip-probes", probes=["Who?"], max_kl=0.1),
        resolve("kvzip-probes", probes=["Who?"], max_bytes=10_000),
    ]
    assert len({of_context("m", b"\x01\x00\x00\x00", how.parameters()) for how in kinds}) == 4
    assert resolve("corm").keep_ratio == 1.0  # the method finds its budget
    assert resolve(max_kl=0.1).keep_ratio == 1.0
    assert resolve(max_bytes=5000).estimated_bytes(1_000_000) == 5000


def test_defaults_without_a_transform_are_kvzip_fisher_at_a_quarter_in_rotated_int4() -> None:
    assert resolve(None, None, None) == Compression("kvzip-fisher", 0.25, "int4-hadamard")
    assert resolve("auto") == resolve()
    assert resolve("full", None, None).keep_ratio == 1.0


def test_with_a_transform_everything_is_kept_at_a_sixteenth_unless_something_else_is_said() -> None:
    whole = Compression("full", 1.0, "tc", ratio=16.0)
    assert resolve(transforms=True) == resolve("auto", transforms=True) == resolve(codec="tc") == whole
    assert resolve(ratio=16) == resolve(keep_ratio=1.0, codec="tc") == whole
    assert resolve(max_kl=0.1, transforms=True) == Compression("full", 1.0, "tc", None, 0.1)
    assert resolve(keep_ratio=0.5, transforms=True) == Compression("kvzip-fisher", 0.5, "int4-hadamard")
    assert resolve(keep_ratio=0.5, ratio=20) == Compression("kvzip-fisher", 0.5, "tc", ratio=20.0)
    assert resolve("kvzip", transforms=True) == Compression("kvzip", 0.25, "int4-hadamard")
    assert resolve("kvzip", codec="tc", max_bytes=10**5) == Compression("kvzip", 0.25, "tc", 10**5)
    assert whole.estimated_bytes(1600) == 100
    assert not resolve(max_kl=0.1, transforms=True).searches


def test_a_codec_and_a_policy_name_the_tables_that_they_need() -> None:
    found = {"heads": "h", "transform": "t"}
    both = with_artifacts(resolve("duo", 0.5, "tc"), found)
    assert (both.artifact, both.transform) == ("h", "t")
    neither = with_artifacts(resolve("kvzip", 0.5, "int4"), found)
    assert (neither.artifact, neither.transform) == ("", "")
    with pytest.raises(errors.ArtifactMissing, match=r"the codec tc needs .* choose another codec"):
        with_artifacts(resolve(codec="tc"), {"heads": "h"})
    with pytest.raises(errors.ArtifactMissing, match=r"the policy duo needs .* choose another policy"):
        with_artifacts(resolve("duo"), {"transform": "t"})
    assert len({msgspec.json.encode(how.parameters()) for how in (both, resolve("duo", 0.5, "tc"))}) == 2


def test_every_error_has_its_own_code_and_comes_back_from_it() -> None:
    leaves = [found for found in errors.all_errors() if not found.__subclasses__()]
    assert len({found.code for found in leaves}) == len(leaves)
    for leaf in leaves:
        assert type(errors.from_code(leaf.code, "x")) is leaf
    assert type(errors.from_code("unheard_of", "x")) is errors.InternalError


@given(st.floats(5e-324, 2.0), st.floats(5e-324, 1.0), st.integers(0, 2**32))
def test_no_temperature_and_no_top_p_is_too_small_to_draw(temperature: float, top_p: float, seed: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 20
    sampled = Sampler(temperature=temperature, top_p=top_p, seed=seed).sample(logits)
    assert 0 <= sampled.token_id < 50
    if temperature < 1e-6 or top_p < 1e-12:
        assert sampled.token_id == int(logits.argmax())
