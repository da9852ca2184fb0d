"""The transform codec in its container: any selection, any step, and nothing malformed taken for a snapshot."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.axes import measure
from precis.codecs import Codec
from precis.codecs.tc import TransformCodec
from precis.container import CODECS, Packed, pack
from precis.core import Snapshot
from precis.errors import BudgetTooSmall, SnapshotCorrupt, SnapshotError
from precis.families import Model, Rotary
from precis.manifest import open_manifest, seal_of
from precis.observations.fisher import RepeatGradients
from precis.observations.repeat import RepeatAttention
from precis.rates import Coding, classes_of
from precis.reader import check_manifest, unpack
from precis.transform import Transform
from tests.precis.build import N_CONTEXT, cut, document, read, tokens

KEY = b"secret"


@pytest.fixture(scope="module")
def transforms(model: Model, rotary: Rotary) -> dict[int, Transform]:
    texts = [document(tokens(120, seed)) for seed in (21, 22)]
    return {size: measure(model, rotary, texts, size, 999, 1) for size in (1, 2, 4)}


def kept(model: Model, share: float) -> Snapshot:
    keep = torch.rand(4, 2, N_CONTEXT, generator=torch.Generator().manual_seed(0)) < share
    if share < 1:
        keep[1, 0] = False
    keep[..., :4] |= share >= 1
    return cut(read(model, tokens(N_CONTEXT)), keep)


def reloaded(packed: Packed, codec: Codec, model: Model, rotary: Rotary) -> Snapshot:
    codecs = {**CODECS, codec.name: codec}
    manifest = open_manifest(packed.manifest, KEY)
    check_manifest(manifest, model.geometry, manifest.fingerprint, codecs)
    return unpack(manifest, packed.blobs, model, rotary, codecs)


def error(one: Snapshot, other: Snapshot) -> float:
    both = zip((one.keys, one.values), (other.keys, other.values), strict=True)
    return max(float((a - b).abs().max()) for a, b in both)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.02])
def test_any_selection_comes_back_as_near_as_the_step(
    model: Model, rotary: Rotary, transforms: dict[int, Transform], size: int, share: float
) -> None:
    snapshot = kept(model, share)
    steps, found = (1e-6, 1e-3), []
    for step in steps:
        codec = TransformCodec(transforms[size], step)
        packed = pack(snapshot, codec, rotary, KEY)
        again = reloaded(packed, TransformCodec(transforms[size]), model, rotary)
        assert torch.equal(again.positions, snapshot.positions)
        assert torch.equal(again.offsets, snapshot.offsets)
        assert len(packed.blobs) == 4 // size
        found.append((error(again, snapshot), packed.n_bytes))
    assert found[0][0] < found[1][0]
    assert found[0][0] < 0.1 * float(snapshot.values.std())
    assert found[0][1] > found[1][1]


def test_finer_classes_bring_their_tokens_nearer(
    model: Model, rotary: Rotary, transforms: dict[int, Transform]
) -> None:
    snapshot = kept(model, 1.0)
    classes = torch.zeros(2, N_CONTEXT, dtype=torch.int64)
    classes[:, 50:100] = 8
    codec = TransformCodec(transforms[2], 3e-4, classes)
    again = reloaded(pack(snapshot, codec, rotary, KEY), TransformCodec(transforms[2]), model, rotary)
    fine = (snapshot.positions >= 50) & (snapshot.positions < 100)
    wrong = (again.values - snapshot.values).square().mean(-1)
    assert float(wrong[fine].mean()) < 0.02 * float(wrong[~fine & (snapshot.positions >= 4)].mean())


def test_sinks_are_kept_at_eight_bits_however_coarse_the_step(
    model: Model, rotary: Rotary, transforms: dict[int, Transform]
) -> None:
    snapshot = kept(model, 1.0)
    snapshot = replace(snapshot, header=replace(snapshot.header, n_sink=4))
    again = reloaded(
        pack(snapshot, TransformCodec(transforms[2], 1e3), rotary, KEY), TransformCodec(transforms[2]), model, rotary
    )
    sinks = snapshot.positions < 4
    spread = float(snapshot.values[sinks].max() - snapshot.values[sinks].min())
    assert float((again.values - snapshot.values)[sinks].abs().max()) < spread / 255
    rest = again.values[~sinks].view(4, 2, -1, again.values.shape[1])
    torch.testing.assert_close(rest, transforms[2].mean[:, 1, :, None].expand(rest.shape), atol=1e-4, rtol=1e-3)


def test_a_snapshot_of_another_block_size_or_codec_is_refused(
    model: Model, rotary: Rotary, transforms: dict[int, Transform]
) -> None:
    packed = pack(kept(model, 0.5), TransformCodec(transforms[2], 1e-3), rotary, KEY)
    manifest = open_manifest(packed.manifest, KEY)
    for codecs in (CODECS, {"tc": TransformCodec(transforms[1])}):
        with pytest.raises(SnapshotCorrupt, match="does not fit"):
            check_manifest(manifest, model.geometry, manifest.fingerprint, codecs)
    odd, snapshot = replace(transforms[1], axes=transforms[1].axes[:1], mean=transforms[1].mean[:3]), kept(model, 0.5)
    with pytest.raises(ValueError, match="3 layers at a time"):
        pack(snapshot, TransformCodec(odd), rotary, KEY)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damage_is_refused(
    model: Model, rotary: Rotary, transforms: dict[int, Transform], data: st.DataObject
) -> None:
    codec = TransformCodec(transforms[2], 1e-3)
    packed = pack(kept(model, 0.5), codec, rotary, KEY)
    pieces = [packed.manifest, *packed.blobs]
    index = data.draw(st.integers(0, len(pieces) - 1))
    damaged = bytearray(pieces[index])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    pieces[index] = bytes(damaged)
    with pytest.raises(SnapshotError):
        reloaded(Packed(pieces[0], tuple(pieces[1:])), codec, model, rotary)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60))
def test_a_header_of_nonsense_is_refused_even_under_a_right_seal(
    model: Model, rotary: Rotary, transforms: dict[int, Transform], header: bytes
) -> None:
    codec = TransformCodec(transforms[2], 1e-3)
    packed = pack(kept(model, 0.5), codec, rotary, KEY)
    body = msgspec.json.encode(msgspec.structs.replace(open_manifest(packed.manifest, KEY), codec_header=header))
    with pytest.raises(SnapshotCorrupt):
        reloaded(Packed(seal_of(body, KEY) + body, packed.blobs), codec, model, rotary)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_step_is_found_that_fills_a_limit(
    model: Model, rotary: Rotary, transforms: dict[int, Transform], size: int, share: float
) -> None:
    snapshot = kept(model, share)
    classes = torch.randint(-2, 3, (4 // size, N_CONTEXT), generator=torch.Generator().manual_seed(1))
    coding, errors = Coding.of(snapshot, transforms[size], classes, rotary, KEY), []
    for limit in (20_000, 12_000):
        packed = coding.within(limit)
        assert 0.95 * limit < packed.n_bytes <= limit
        errors.append(error(reloaded(packed, TransformCodec(transforms[size]), model, rotary), snapshot))
    assert errors[0] < errors[1]
    with pytest.raises(BudgetTooSmall, match="too few"):
        coding.within(300)


def test_tokens_that_are_read_more_deserve_more(model: Model) -> None:
    g = model.geometry
    full = read(model, tokens(N_CONTEXT))
    squares = torch.full((4, 2, N_CONTEXT), 1e-4)
    squares[:2, :, 10] = 1e-4 * 4**5  # importance is squared precision: five octaves, less the exponent
    squares[:, :, 0] = 0  # outside of what was repeated
    squares[2:, 1, 20] = 1e-6
    seen = torch.cat([torch.zeros(4, g.n_heads, N_CONTEXT), squares], 1)
    found = classes_of(replace(full, observed={RepeatAttention(): seen}), 2)
    assert found.shape == (2, N_CONTEXT)
    assert found[0, 10] == 8  # in half octaves
    assert found[1, 10] == 0
    assert found[1, 20] == -1  # the other head of the block still reads it
    assert found[0, 0] == found[0].sort(descending=True).values[N_CONTEXT // 10 - 1]
    information = torch.cat([torch.zeros(4, g.n_heads, N_CONTEXT), torch.ones_like(squares), squares], 1)
    milder = classes_of(replace(full, observed={RepeatGradients(): information}), 2)
    assert milder[0, 10] == 4
    with pytest.raises(ValueError, match="not observed"):
        classes_of(replace(full, observed={}), 2)


def test_a_document_that_nothing_reads_has_equal_classes(model: Model) -> None:
    full = read(model, tokens(N_CONTEXT))
    nothing = torch.zeros(4, model.geometry.n_heads + 2, N_CONTEXT)
    assert not bool(classes_of(replace(full, observed={RepeatAttention(): nothing}), 2).any())


def test_what_is_missing_is_filled_with_its_expectation(transforms: dict[int, Transform]) -> None:
    transform = transforms[2]
    chance = torch.Generator().manual_seed(3)
    variances = torch.exp2(transform.scales[0].float())
    drawn = torch.randn(200, len(variances), generator=chance) * variances.sqrt()
    truth = transform.backward(0, drawn)
    missing = torch.rand(truth.shape[0], truth.shape[1], 1, truth.shape[3], 1, generator=chance) < 0.5
    mean = transform.mean_of(0).expand_as(truth)
    filled = transform.completed(0, torch.where(missing, mean, truth), missing)
    gone = missing.expand_as(truth)
    assert torch.equal(filled[~gone], truth[~gone])
    assert (filled - truth)[gone].square().sum() < 0.95 * (mean - truth)[gone].square().sum()
    whole = transform.completed(0, truth, torch.zeros_like(missing))
    assert torch.equal(whole, truth)
