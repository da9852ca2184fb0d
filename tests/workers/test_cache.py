"""The tiers of snapshots in a worker: device, host, store; each bounded, the least recently used out first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from precis.core import Snapshot
from precis.errors import SnapshotMissing
from precis.families import Rotary
from precis.fingerprint import of_context
from precis.pipeline import compress
from precis.wire.presets import Compression
from precis.wire.records import ContextRecord
from tests.precis.build import N_CONTEXT, attached, document, tokens
from workers.cache import SnapshotCache
from workers.memory import Arena

HOW = Compression("full", 1.0, "raw16")


@dataclass
class Records:
    """Source tokens of contexts."""

    tokens: dict[str, bytes]
    ready: dict[str, ContextRecord]

    def raw_tokens(self, record: ContextRecord) -> bytes:
        return self.tokens[record.id]

    def get(self, context_id: str) -> ContextRecord | None:
        return self.ready.get(context_id)


@dataclass
class Store:
    """Packed snapshots, and how often one was read."""

    packed: dict[str, Any]
    n_reads: int = 0

    def manifest(self, context_id: str) -> bytes:
        self.n_reads += 1
        if context_id not in self.packed:
            raise SnapshotMissing("it is gone")
        data: bytes = self.packed[context_id].manifest
        return data

    def origin(self, context_id: str) -> str:
        return "store"

    def blobs(self, context_id: str, sizes: list[int]) -> Any:
        return iter(self.packed[context_id].blobs)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Records, dict[str, Any], int]:
    """A model with four contexts, and the bytes of one snapshot in memory."""
    model = attached()
    rotary = Rotary(model, 512)
    served = type("Served", (), {"model": model, "rotary": rotary, "card": type("Card", (), {"digest": model.digest})})
    sources, packed, records, size = {}, {}, {}, 0
    for name in "abcd":
        token_ids = tokens(N_CONTEXT, seed=ord(name))
        made = compress(model, rotary, document(token_ids), HOW)
        sources[name] = token_ids.numpy().astype("<i4").tobytes()
        packed[name], size = made.packed, made.snapshot.n_bytes
        fingerprint = of_context(model.digest, sources[name], HOW.parameters())
        records[name] = ContextRecord(
            name, "m", "t", fingerprint, HOW, "raw", [], (0, N_CONTEXT), N_CONTEXT, 0.0, status="ready"
        )
    return served, Records(sources, records), packed, size


def cache(parts: Any, n_hot: float, n_beside: float, arena: Arena | None = None) -> SnapshotCache:
    served, records, packed, size = parts
    return SnapshotCache(served, records, Store(dict(packed)), b"", int(n_hot * size), arena, int(n_beside * size))  # type: ignore[arg-type]


def find(held: SnapshotCache, parts: Any, names: str) -> list[str]:
    return [held.find(parts[1].ready[name])[1] for name in names]


def test_what_the_device_has_no_room_for_is_held_beside_it_and_comes_back(parts: Any) -> None:
    held = cache(parts, 1.5, 2.5)
    assert find(held, parts, "aabab") == ["store", "memory", "store", "host", "host"]
    assert find(held, parts, "cd") == ["store", "store"]
    assert sorted(held.hot_ids) == ["b", "c", "d"]  # one on the device, two beside it: `a` was used longest ago
    assert find(held, parts, "dcba") == ["memory", "host", "host", "store"]


def test_the_same_entries_come_back_from_every_tier(parts: Any) -> None:
    held = cache(parts, 1.5, 2.5)
    first, _ = held.find(parts[1].ready["a"])
    held.find(parts[1].ready["b"])
    again, origin = held.find(parts[1].ready["a"])
    assert origin == "host"
    for name in ("keys", "values", "positions", "offsets"):
        assert torch.equal(getattr(again, name), getattr(first, name))
    assert again.header == first.header


def test_without_host_bytes_there_is_one_tier(parts: Any) -> None:
    held = cache(parts, 2.5, 0)
    assert find(held, parts, "abcabb") == ["store"] * 5 + ["memory"]
    assert held.hot_ids == ["a", "b"]


def test_a_held_snapshot_of_another_fingerprint_is_not_used(parts: Any) -> None:
    held = cache(parts, 1.5, 2.5)
    record: ContextRecord = parts[1].ready["a"]
    snapshot: Snapshot = held.find(record)[0]
    stale = replace(snapshot, header=replace(snapshot.header, fingerprint="other"))
    held.keep("a", stale)
    assert held.find(record)[1] == "store"
    held.keep("a", stale)
    held.find(parts[1].ready["b"])  # pushes it out to the host
    assert held.find(record)[1] == "store"


def test_dropping_forgets_every_tier(parts: Any) -> None:
    held = cache(parts, 1.5, 2.5)
    find(held, parts, "ab")
    held.drop("a")
    held.drop("b")
    assert held.hot_ids == []
    assert find(held, parts, "ab") == ["store", "store"]


def test_loading_ahead_makes_the_first_question_a_hit_and_says_what_was_wrong(parts: Any) -> None:
    held = cache(parts, 2.5, 0)
    assert held.load_ahead("a") == "store"
    assert held.load_ahead("a") == "memory"
    assert find(held, parts, "a") == ["memory"]
    assert held.load_ahead("nothing") == "gone"
    del held.store.packed["b"]  # type: ignore[attr-defined]
    assert held.load_ahead("b") == "snapshot_missing"
