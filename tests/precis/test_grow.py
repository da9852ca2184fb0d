"""A document that grows: what is new is read on top of what is stored, and what was stored stays as it was."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from precis.container import Packed
from precis.core import Snapshot
from precis.errors import SnapshotCorrupt
from precis.families import Model, Rotary
from precis.full_cache import Document
from precis.grow import Stored, grow, stored_classes
from precis.manifest import Manifest, open_manifest
from precis.pipeline import compress
from precis.wire.presets import Compression
from tests.precis.build import asked, attached, document, tokens

N, MORE = 150, 60


def stored(model: Model, rotary: Rotary, how: Compression, n: int = N) -> tuple[Stored, Snapshot]:
    made = compress(model, rotary, document(tokens(N + 2 * MORE)[:n]), how)
    return of(made.packed), made.snapshot


def of(packed: Packed) -> Stored:
    return Stored(open_manifest(packed.manifest), packed.blobs)


def longer(n: int) -> Document:
    return document(tokens(N + 2 * MORE)[:n])


def test_with_nothing_lost_it_is_the_document_read_at_once() -> None:
    model = attached()
    rotary = Rotary(model, 512)
    how = asked(model, "full", 1.0, "raw16")
    before, _ = stored(model, rotary, how)
    packed, snapshot, classes = grow(model, rotary, longer(N + MORE), how, before)
    at_once = compress(model, rotary, longer(N + MORE), how)
    assert classes is None
    assert open_manifest(packed.manifest).fingerprint == open_manifest(at_once.packed.manifest).fingerprint
    assert torch.equal(snapshot.positions, at_once.snapshot.positions)
    assert torch.allclose(snapshot.keys, at_once.snapshot.keys, atol=2e-3)
    assert torch.allclose(snapshot.values, at_once.snapshot.values, atol=2e-3)


def test_old_entries_stay_as_they_were_however_often_it_grows(model: Model, rotary: Rotary) -> None:
    how = asked(model, "full", 1.0, "tc")
    found, first = stored(model, rotary, how)
    step, classes = stored_classes(found, model)
    for n in (N + MORE, N + 2 * MORE):
        packed, snapshot, known = grow(model, rotary, longer(n), how, found)
        found = of(packed)
        assert known is not None
        step_now, classes_now = stored_classes(found, model)
        assert step_now == step
        assert torch.equal(classes_now[:, :N], classes)
        assert torch.equal(classes_now[:, 4:], known[:, 4:])
        shape = (first.offsets.shape[0] - 1, -1, first.keys.shape[1])
        for one, other in ((first.keys, snapshot.keys), (first.values, snapshot.values)):
            a, b = one.view(shape), other.view(shape)[:, :N]
            assert float((a - b).abs().max()) < 0.02 * float(a.abs().max())
        assert snapshot.header.next_position == n
        assert found.manifest.counts == [[n] * 2] * 4


def test_new_tokens_are_as_near_as_those_of_the_document_read_at_once(model: Model, rotary: Rotary) -> None:
    how = asked(model, "full", 1.0, "tc")
    exact = compress(model, rotary, longer(N + MORE), asked(model, "full", 1.0, "raw16")).snapshot
    at_once = compress(model, rotary, longer(N + MORE), how)
    found, _ = stored(model, rotary, how)
    packed, snapshot, _ = grow(model, rotary, longer(N + MORE), how, found)

    def error(of: Snapshot) -> float:
        shape = (exact.offsets.shape[0] - 1, -1, exact.keys.shape[1])
        return float((of.values.view(shape)[:, N:] - exact.values.view(shape)[:, N:]).square().mean())

    assert error(snapshot) < 3 * error(at_once.snapshot)
    assert 0.7 < packed.n_bytes / at_once.packed.n_bytes < 1.4


def test_bytes_are_kept_to(model: Model, rotary: Rotary) -> None:
    n_bytes = compress(model, rotary, longer(N), asked(model, "full", 1.0, "tc")).packed.n_bytes
    how = replace_ratio(asked(model, "full", 1.0, "tc"), max_bytes=n_bytes + 2000)
    found, _ = stored(model, rotary, how)
    packed, _, _ = grow(model, rotary, longer(N + MORE), how, found)
    assert packed.n_bytes <= n_bytes + 2000


def replace_ratio(how: Compression, max_bytes: int) -> Compression:
    return msgspec.structs.replace(how, ratio=None, max_bytes=max_bytes)


@pytest.mark.parametrize("policy", ["snapkv", "streaming"])
def test_what_evicts_is_not_grown(model: Model, rotary: Rotary, policy: str) -> None:
    how = asked(model, policy, 0.5, "raw16")
    found, _ = stored(model, rotary, how)
    with pytest.raises(ValueError, match=r"whole cache|looks at all"):
        grow(model, rotary, longer(N + MORE), how, found)


def test_sliding_windows_that_are_full_are_not_grown() -> None:
    model = attached("gemma2")
    rotary = Rotary(model, 512)
    how = asked(model, "full", 1.0, "raw16")
    found, _ = stored(model, rotary, how)
    with pytest.raises(ValueError, match="whole cache"):
        grow(model, rotary, longer(N + MORE), how, found)


def test_a_damaged_blob_is_refused(model: Model, rotary: Rotary) -> None:
    how = asked(model, "full", 1.0, "tc")
    found, _ = stored(model, rotary, how)
    bad = bytearray(found.blobs[1])
    bad[len(bad) // 2] ^= 1
    with pytest.raises(SnapshotCorrupt):
        grow(model, rotary, longer(N + MORE), how, replace(found, blobs=[found.blobs[0], bytes(bad), *found.blobs[2:]]))
    assert isinstance(found.manifest, Manifest)
