"""A stored snapshot cut down to a smaller budget is the snapshot that the smaller budget would have given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from precis.attempt import Compressed, header_of
from precis.core import SnapshotHeader
from precis.errors import SnapshotCorrupt
from precis.families import Model, Rotary
from precis.manifest import open_manifest
from precis.pipeline import compress
from precis.protection import count_protected
from precis.ranking import levels_of, rank_per_head
from precis.reader import load
from precis.tighten import tighten
from precis.wire.presets import PRESETS, Compression
from tests.precis.build import N_CONTEXT, attached, document, tokens

NESTED = [name for name, preset in PRESETS.items() if preset.nested]
PROBES = ((21, 22, 23),)
RATIOS = {"lagkv": 0.95, "fisher": 0.87, "kvzip-fisher": 0.87}  # budgets with one and the same protected window


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Model:
    return attached(request.param)


def made(model: Model, policy: str, ratio: float, codec: str) -> Compressed:
    asked = replace(document(tokens(N_CONTEXT)), probes=PROBES)
    return compress(model, Rotary(model, 512), asked, Compression(policy, ratio, codec), b"key")


def cut(model: Model, loose: Compressed, how: Compression, per_head: int) -> Compressed:
    asked = replace(document(tokens(N_CONTEXT)), probes=PROBES)
    header = header_of(model, asked, how)
    n_protected = count_protected(N_CONTEXT, how.policy, per_head, asked.protected)
    manifest = open_manifest(loose.packed.manifest, b"key")
    packed = tighten(manifest, list(loose.packed.blobs), model.geometry, per_head, n_protected, header, b"key")
    snapshot = load(model, Rotary(model, 512), packed, header.fingerprint, b"key")
    return replace(loose, packed=packed, snapshot=snapshot)


@pytest.mark.parametrize("policy", NESTED)
def test_tightening_equals_compressing_at_the_smaller_budget(model: Model, policy: str) -> None:
    ratio = RATIOS.get(policy, 0.6)
    loose, how = made(model, policy, 0.98, "raw16"), Compression(policy, ratio, "raw16")
    expected = made(model, policy, ratio, "raw16")
    found = cut(model, loose, how, round(N_CONTEXT * ratio))
    same = torch.isin(_named(found), _named(expected))
    assert found.snapshot.positions.shape == expected.snapshot.positions.shape
    assert int((~same).sum()) <= 4  # levels tell 255 steps apart; more entries than that compete globally
    if bool(same.all()):
        assert torch.equal(found.snapshot.keys, expected.snapshot.keys)
        assert torch.equal(found.snapshot.values, expected.snapshot.values)
    again = cut(model, found, Compression(policy, ratio - 0.02, "raw16"), round(N_CONTEXT * (ratio - 0.02)))
    assert bool(torch.isin(_named(again), _named(found)).all())


def _named(one: Compressed) -> torch.Tensor:
    """One number per kept entry."""
    counts = one.snapshot.offsets[1:] - one.snapshot.offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(counts)), counts) * 1000 + one.snapshot.positions


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_entries_stay_close(codec: str) -> None:
    model = attached()
    loose = made(model, "kvzip", 0.8, codec)
    found = cut(model, loose, Compression("kvzip", 0.4, codec), 60)
    expected = made(model, "kvzip", 0.4, codec)
    error = (found.snapshot.values - expected.snapshot.values).abs().max()
    assert float(error) < {"int8": 0.02, "int4": 0.25}[codec] * float(expected.snapshot.values.abs().max())
    assert found.packed.n_bytes < loose.packed.n_bytes


def test_damaged_or_missing_levels_are_refused_and_unranked_snapshots_cannot_be_tightened() -> None:
    model = attached()
    loose = made(model, "kvzip", 0.8, "int4")
    manifest, header = open_manifest(loose.packed.manifest, b"key"), SnapshotHeader("f", 150, 150, 4, {})
    blobs = list(loose.packed.blobs)
    for wrong in (blobs[:-1], [*blobs[:-1], blobs[-1][:-1]], [*blobs[:-1], bytes([blobs[-1][0] ^ 1]) + blobs[-1][1:]]):
        with pytest.raises(SnapshotCorrupt, match="levels"):
            tighten(manifest, wrong, model.geometry, 60, 4, header)
    with pytest.raises(SnapshotCorrupt, match="layer 0"):
        tighten(manifest, [b"", *blobs[1:]], model.geometry, 60, 4, header)
    plain = made(model, "critical-adakv", 0.8, "int4")
    assert len(plain.packed.blobs) == 4
    with pytest.raises(ValueError, match="does not nest"):
        tighten(open_manifest(plain.packed.manifest, b"key"), list(plain.packed.blobs), model.geometry, 60, 4, header)


def test_other_protected_tokens_or_more_entries_than_there_are_are_refused() -> None:
    model = attached()
    loose = made(model, "kvzip", 0.5, "int4")
    manifest, blobs = open_manifest(loose.packed.manifest, b"key"), list(loose.packed.blobs)
    header = SnapshotHeader("f", 150, 150, 4, {})
    with pytest.raises(ValueError, match="protects other tokens"):
        tighten(manifest, blobs, model.geometry, 60, 5, header)
    with pytest.raises(ValueError, match="keeps less"):
        tighten(manifest, blobs, model.geometry, 76, 4, header)


def test_levels_follow_the_ranking() -> None:
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(0))
    kept = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    levels = levels_of(scores, kept, "head").long()
    ranks = rank_per_head(scores, ~kept)
    for layer in range(2):
        for head in range(3):
            inside = kept[layer, head]
            order = ranks[layer, head][inside].argsort()
            assert bool((levels[layer, head][inside][order].diff() < 0).all())
    assert int(levels.max()) == 254
    assert not bool(levels[~kept].any())
