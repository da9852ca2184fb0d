"""Every call of the snapshot store, with every fault in each of its commands: right bytes, or an honest error."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import redis
import torch

from precis.container import CODECS, Packed, pack
from precis.core import Snapshot, SnapshotHeader
from precis.errors import SnapshotError, StoreFull
from precis.families import Model, Rotary
from precis.manifest import open_manifest
from precis.reader import check_manifest, unpack
from precis.wire import keys
from precis.wire.vault import Vault
from tests.chaos.faulty import FAULTS, Plan, faulty
from tests.precis.build import attached
from tests.stack import Server
from workers.snapshots import SnapshotStore

CHUNK, PARTS = 700, 6000
HONEST = (SnapshotError, StoreFull, redis.ConnectionError, redis.TimeoutError)
SECRET = "a secret that is long enough for a test"


@pytest.fixture(scope="module")
def model() -> Model:
    return attached()


@pytest.fixture(scope="module")
def rotary(model: Model) -> Rotary:
    return Rotary(model, 512)


def snapshot(model: Model, seed: int) -> Snapshot:
    g, n = model.geometry, 40
    generator = torch.Generator().manual_seed(seed)
    keys_, values = torch.randn(2, g.n_layers * g.n_kv_heads * n, g.head_dim, generator=generator)
    positions = torch.arange(n, dtype=torch.int32).repeat(g.n_layers * g.n_kv_heads)
    offsets = torch.arange(g.n_layers * g.n_kv_heads + 1) * n
    return Snapshot(g, SnapshotHeader(f"print{seed}", n, n, 0, {}), keys_, values, positions, offsets)


def packed(model: Model, rotary: Rotary, seed: int) -> Packed:
    return pack(snapshot(model, seed), CODECS["int8"], rotary)


def loaded(store: SnapshotStore, model: Model, rotary: Rotary, fingerprint: str) -> Snapshot:
    """As a worker loads it."""
    manifest = open_manifest(store.manifest("c"))
    check_manifest(manifest, model.geometry, fingerprint)
    return unpack(manifest, store.blobs("c", manifest.blob_bytes), model, rotary)


def store_on(server: Server, plan: Plan, secret: str) -> SnapshotStore:
    return SnapshotStore(faulty(server.url, plan), CHUNK, PARTS, Vault(secret))


@pytest.mark.parametrize("secret", ["", SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_while_reading_gives_wrong_entries(
    server: Server, model: Model, rotary: Rotary, fault: str, secret: str
) -> None:
    whole = Plan()
    store = store_on(server, whole, secret)
    store.put("c", packed(model, rotary, 1), time.time() + 600)
    whole.seen.clear()
    want = loaded(store, model, rotary, "print1")
    assert len(whole.seen) > 10
    n_honest = 0
    for at in range(len(whole.seen)):
        store_on(server, Plan(), secret).put("c", packed(model, rotary, 1), time.time() + 600)
        try:
            found = loaded(store_on(server, Plan(at, fault, keys.snapshot("c") + "*"), secret), model, rotary, "print1")
        except HONEST:
            n_honest += 1
        else:
            assert torch.equal(found.keys, want.keys)
            assert torch.equal(found.values, want.values)
            assert torch.equal(found.positions, want.positions)
    assert n_honest > len(whole.seen) // 2


@pytest.mark.parametrize("fault", ["error", "timeout", "drop reply", "evict"])
def test_no_fault_while_writing_publishes_half_a_snapshot(
    server: Server, model: Model, rotary: Rotary, fault: str
) -> None:
    old, new = packed(model, rotary, 1), packed(model, rotary, 2)
    whole = Plan()
    store_on(server, whole, "").put("c", new, time.time() + 600)
    n_new = 0
    for at in range(len(whole.seen)):
        calm = store_on(server, Plan(), "")
        server.client().flushall()
        calm.put("c", old, time.time() + 600)
        with contextlib.suppress(*HONEST):
            store_on(server, Plan(at, fault, "staging*"), "").put("c", new, time.time() + 600)
        fingerprint = open_manifest(calm.manifest("c")).fingerprint
        assert fingerprint in ("print1", "print2")
        want = snapshot(model, int(fingerprint[-1]))
        found = loaded(calm, model, rotary, fingerprint)
        assert float((found.values - want.values).abs().max()) < 0.05
        n_new += fingerprint == "print2"
        left: list[Any] = server.client().keys("staging*")
        assert all(0 < server.client().ttl(key) <= 600 for key in left)  # gone by themselves
    assert n_new > 0 or fault == "error"


@pytest.mark.parametrize("fault", ["error", "timeout", "drop reply"])
def test_what_was_not_removed_for_sure_is_said(server: Server, model: Model, rotary: Rotary, fault: str) -> None:
    whole = Plan()
    store = store_on(server, whole, "")
    store.put("c", packed(model, rotary, 1), None)
    whole.seen.clear()
    store.remove("c")
    assert server.client().keys("*") == []
    for at in range(len(whole.seen)):
        store_on(server, Plan(), "").put("c", packed(model, rotary, 1), None)
        with pytest.raises(HONEST):
            store_on(server, Plan(at, fault), "").remove("c")
