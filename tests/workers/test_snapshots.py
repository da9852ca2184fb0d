"""Snapshots in a real store: whole or not at all, whatever happens."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from precis.container import Packed
from precis.errors import SnapshotMissing, StoreFull
from precis.wire import keys
from tests.stack import Server, running_server
from workers.snapshots import SnapshotStore, split_layers

CHUNK = 1000


def packed(seed: int = 0, layers: int = 5, size: int = 2500) -> Packed:
    generator = random.Random(seed)
    return Packed(b"manifest%d" % seed, tuple(generator.randbytes(size + layer) for layer in range(layers)))


def read(store: SnapshotStore, context_id: str, like: Packed) -> Packed:
    blobs = tuple(store.blobs(context_id, [len(blob) for blob in like.blobs]))
    return Packed(store.manifest(context_id), blobs)


def test_what_was_put_comes_back(client: Any) -> None:
    store, snapshot = SnapshotStore(client, CHUNK), packed()
    store.put("c", snapshot, time.time() + 100)
    assert read(store, "c", snapshot) == snapshot
    assert client.keys("staging*") == []
    assert 90_000 < client.pttl(keys.snapshot("c")) <= 100_000
    assert max(map(len, client.hvals(keys.snapshot("c")))) == CHUNK


def test_a_reader_with_other_piece_sizes_reads_the_same(client: Any) -> None:
    snapshot = packed()
    SnapshotStore(client, CHUNK).put("c", snapshot, None)
    assert read(SnapshotStore(client, 64), "c", snapshot) == snapshot
    assert client.pttl(keys.snapshot("c")) == -1


def test_a_new_snapshot_replaces_the_old_one_whole(client: Any) -> None:
    store = SnapshotStore(client, CHUNK)
    store.put("c", packed(1), None)
    store.put("c", packed(2), None)
    assert read(store, "c", packed(2)) == packed(2)
    assert len(client.keys("*")) == 1


def test_a_large_snapshot_becomes_several_hashes_that_come_and_go_together(client: Any) -> None:
    store, snapshot = SnapshotStore(client, CHUNK, part_bytes=6000), packed()
    store.put("c", snapshot, time.time() + 100)
    assert len(client.keys("snapshot*")) == 3
    assert read(store, "c", snapshot) == snapshot
    store.remove("c")
    assert client.keys("*") == []


def test_layers_are_split_in_order_within_the_limit() -> None:
    assert split_layers([5, 5, 5, 20, 1], 10) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert split_layers([1], 10) == [range(1)]


def test_a_missing_snapshot_is_missing_and_one_that_goes_while_being_read_too(client: Any) -> None:
    store, snapshot = SnapshotStore(client, CHUNK), packed()
    with pytest.raises(SnapshotMissing):
        store.manifest("nothing")
    store.put("c", snapshot, None)
    reading = store.blobs("c", [len(blob) for blob in snapshot.blobs])
    assert next(reading) == snapshot.blobs[0]
    client.delete(keys.snapshot("c"))
    with pytest.raises(SnapshotMissing, match="while it was being read"):
        next(reading)


def test_a_missing_piece_gives_a_short_blob_that_its_checksum_finds(client: Any) -> None:
    store, snapshot = SnapshotStore(client, CHUNK), packed()
    store.put("c", snapshot, None)
    client.hdel(keys.snapshot("c"), "2.1")
    assert list(store.blobs("c", [len(blob) for blob in snapshot.blobs]))[2] != snapshot.blobs[2]


def test_eviction_takes_whole_snapshots_only() -> None:
    with running_server("--maxmemory", "6mb", "--maxmemory-policy", "volatile-lru") as server:
        client = server.client()
        store = SnapshotStore(client, 50_000)
        made = {f"c{i}": packed(i, layers=4, size=100_000) for i in range(20)}
        for context_id, snapshot in made.items():
            store.put(context_id, snapshot, time.time() + 1000)
        whole = 0
        for context_id, snapshot in made.items():
            try:
                assert read(store, context_id, snapshot) == snapshot
                whole += 1
            except SnapshotMissing:
                pass
        assert 0 < whole < 20


def test_what_is_evicted_while_it_is_written_is_written_again(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, taken = SnapshotStore(client, CHUNK), list[Any]()
    write, count = SnapshotStore._write, client.hlen

    def evicted_after(n_times: int) -> None:
        def written(self: SnapshotStore, context_id: str, key: str, made: Packed, layers: range) -> int:
            n_fields = write(self, context_id, key, made, layers)
            if len(taken) < n_times:
                taken.append(client.unlink(key))
            return n_fields

        monkeypatch.setattr(SnapshotStore, "_write", written)

    evicted_after(2)
    store.put("c", packed(), None)
    assert len(taken) == 2
    assert read(store, "c", packed()) == packed()
    taken.clear()
    evicted_after(99)
    with pytest.raises(StoreFull):
        store.put("d", packed(), None)
    assert not client.exists(keys.snapshot("d"))
    monkeypatch.undo()

    def counted_then_evicted(key: str) -> int:
        found = count(key)
        if not taken:
            taken.append(client.unlink(key))
        return int(found)

    taken.clear()
    monkeypatch.setattr(client, "hlen", counted_then_evicted)
    store.put("e", packed(), None)
    assert read(store, "e", packed()) == packed()


def test_a_full_store_publishes_nothing_and_says_so() -> None:
    with running_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        client = server.client()
        store = SnapshotStore(client, 100_000)
        with pytest.raises(StoreFull, match="full"):
            store.put("c", packed(0, layers=8, size=1_000_000), None)
        assert client.keys("*") == []
        store.put("c", packed(), None)


def test_a_worker_killed_while_writing_leaves_nothing_for_ever(server: Server, client: Any) -> None:
    store = SnapshotStore(client, CHUNK)
    store._write("c", "staging:{c}:x:0", packed(), range(5))
    assert 0 < client.ttl("staging:{c}:x:0") <= 600
    with pytest.raises(SnapshotMissing):
        store.manifest("c")
