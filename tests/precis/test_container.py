"""The container: a reloaded snapshot is the one in memory, and nothing malformed is ever taken for one."""

from __future__ import annotations

import hmac
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.container import CODECS, Packed, pack
from precis.core import Snapshot
from precis.errors import SnapshotCorrupt, SnapshotError, SnapshotStale
from precis.families import Model, Rotary, weight_digest
from precis.manifest import Manifest, open_manifest
from precis.pipeline import answer, compress
from precis.reader import check_manifest, load, unpack
from precis.sampling import Sampler
from precis.sizes import head_bytes, packed_bytes
from precis.wire.presets import resolve
from tests.precis.build import N_CONTEXT, attached, cut, document, read, tokens

KEY = b"secret"


@pytest.fixture(scope="module")
def snapshot(model: Model) -> Snapshot:
    keep = torch.rand(4, 2, N_CONTEXT, generator=torch.Generator().manual_seed(0)) < 0.3
    keep[1, 0] = False
    return cut(read(model, tokens(N_CONTEXT)), keep)


@pytest.fixture(scope="module")
def packed(snapshot: Snapshot, rotary: Rotary) -> Packed:
    return pack(snapshot, CODECS["int4"], rotary, KEY)


@pytest.mark.parametrize("codec", CODECS)
def test_a_reloaded_snapshot_gives_the_same_greedy_answer_as_the_one_in_memory(
    model: Model, rotary: Rotary, codec: str
) -> None:
    made = compress(model, rotary, document(tokens(N_CONTEXT)), resolve("kvzip", 0.3, codec))
    again = load(model, rotary, made.packed, made.snapshot.header.fingerprint)
    assert torch.equal(again.keys, made.snapshot.keys)
    assert torch.equal(again.positions, made.snapshot.positions)
    assert again.header == made.snapshot.header
    found = [[s.token_id for s in answer(model, s, [5, 6, 7], Sampler(), 10)] for s in (made.snapshot, again)]
    assert found[0] == found[1]


def test_positions_and_offsets_survive_exactly(
    snapshot: Snapshot, packed: Packed, model: Model, rotary: Rotary
) -> None:
    again = load(model, rotary, packed, "f", KEY)
    assert torch.equal(again.positions, snapshot.positions)
    assert torch.equal(again.offsets, snapshot.offsets)


def test_the_same_document_gives_the_same_bytes_twice(model: Model, rotary: Rotary) -> None:
    how = resolve("kvzip", 0.3, "int4")
    one, other = (compress(model, rotary, document(tokens(N_CONTEXT)), how).packed for _ in range(2))
    assert one == other


@pytest.mark.parametrize("codec", CODECS)
def test_sizes_are_told_without_encoding(snapshot: Snapshot, codec: str) -> None:
    told = packed_bytes(snapshot, CODECS[codec])
    true = pack(snapshot, CODECS[codec], Rotary(attached(), 512)).n_bytes
    assert abs(told - true) <= 4 * snapshot.geometry.n_layers  # digits of the blobs' lengths


def test_head_bytes_add_up_to_the_blobs_but_for_padding(snapshot: Snapshot, packed: Packed) -> None:
    sizes = head_bytes(snapshot, CODECS["int4"], packed.blobs)
    for layer, blob in enumerate(packed.blobs):
        assert sum(sizes[layer]) <= len(blob) <= sum(sizes[layer]) + 16 * 12


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_byte_is_refused(data: st.DataObject, packed: Packed, model: Model, rotary: Rotary) -> None:
    pieces = [packed.manifest, *packed.blobs]
    index = data.draw(st.integers(0, len(pieces) - 1))
    at = data.draw(st.integers(0, len(pieces[index]) - 1))
    damaged = bytearray(pieces[index])
    damaged[at] ^= data.draw(st.integers(1, 255))
    pieces[index] = bytes(damaged)
    with pytest.raises(SnapshotError):
        load(model, rotary, Packed(pieces[0], tuple(pieces[1:])), "f", KEY)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_truncation_is_refused(data: st.DataObject, packed: Packed, model: Model, rotary: Rotary) -> None:
    pieces = [packed.manifest, *packed.blobs]
    index = data.draw(st.integers(0, len(pieces) - 1))
    pieces[index] = pieces[index][: data.draw(st.integers(0, len(pieces[index]) - 1))]
    with pytest.raises(SnapshotError):
        load(model, rotary, Packed(pieces[0], tuple(pieces[1:])), "f", KEY)


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        open_manifest(data)


def test_a_missing_layer_is_refused(packed: Packed, model: Model, rotary: Rotary) -> None:
    with pytest.raises(SnapshotCorrupt, match="layer 3"):
        load(model, rotary, Packed(packed.manifest, packed.blobs[:-1]), "f", KEY)


def test_another_key_is_refused(packed: Packed) -> None:
    for key in (b"", b"other"):
        with pytest.raises(SnapshotCorrupt, match="seal"):
            open_manifest(packed.manifest, key)


def test_another_fingerprint_or_format_version_is_stale(packed: Packed, model: Model, rotary: Rotary) -> None:
    with pytest.raises(SnapshotStale, match="other weights"):
        load(model, rotary, packed, "g", KEY)
    newer = msgspec.structs.replace(open_manifest(packed.manifest, KEY), version=99)
    body = msgspec.json.encode(newer)
    with pytest.raises(SnapshotStale, match="version 99"):
        open_manifest(hmac.digest(KEY, body, "sha256") + body, KEY)


CLAIMS = [
    {"n_layers": 3},
    {"head_dim": 6},
    {"n_tokens": 10**9, "next_position": 10**9},
    {"next_position": 1},
    {"codec": "pickle"},
    {"n_sink": -1},
    {"counts": [[1, 2]] * 3},
    {"counts": [[-1, 2]] * 4},
    {"counts": [[10**12, 2]] * 4},
    {"blob_bytes": [1]},
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: next(iter(c)))
def test_a_well_sealed_manifest_with_wrong_claims_is_refused(
    claim: dict[str, object], packed: Packed, model: Model
) -> None:
    manifest = open_manifest(packed.manifest, KEY)
    wrong = msgspec.structs.replace(manifest, **claim)
    with pytest.raises(SnapshotCorrupt, match="fit"):
        check_manifest(wrong, model.geometry, "f")


@given(seed=st.integers(0, 100_000))
@settings(max_examples=80, deadline=None)
def test_wrong_counts_with_valid_checksums_are_refused_or_harmless(
    seed: int, packed: Packed, model: Model, rotary: Rotary
) -> None:
    manifest = open_manifest(packed.manifest, KEY)
    generator = torch.Generator().manual_seed(seed)
    counts = [[int(torch.randint(0, N_CONTEXT, (1,), generator=generator)) for _ in row] for row in manifest.counts]
    wrong: Manifest = msgspec.structs.replace(manifest, counts=counts)
    with pytest.raises(SnapshotCorrupt):
        unpack(wrong, packed.blobs, model, rotary)


def test_a_snapshot_of_another_model_is_refused(packed: Packed) -> None:
    other = attached("qwen3")
    with pytest.raises(SnapshotCorrupt, match="fit the model"):
        check_manifest(open_manifest(packed.manifest, KEY), other.geometry, "f")


def test_the_fingerprint_depends_on_weights_tokens_and_policy(model: Model, rotary: Rotary) -> None:
    def made(m: Model, seed: int, ratio: float) -> str:
        doc = document(tokens(N_CONTEXT, seed))
        return compress(m, rotary, doc, resolve("streaming", ratio, "raw16")).snapshot.header.fingerprint

    perturbed = attached()
    next(iter(perturbed.hf.model.layers[2].self_attn.parameters())).data[0, 0] += 1e-3
    other = replace(perturbed, digest=weight_digest(perturbed.hf))
    base = made(model, 1, 0.5)
    assert made(model, 1, 0.5) == base
    assert base not in {made(model, 2, 0.5), made(model, 1, 0.6), made(other, 1, 0.5)}
