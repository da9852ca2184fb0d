"""What workers say of a context: a late word of one that has lost the job changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from precis.wire import keys
from precis.wire.codec import whole_record
from precis.wire.presets import Compression
from precis.wire.records import ContextRecord, Problem
from workers.records import Records


def stored(client: Any, **fields: Any) -> ContextRecord:
    record = ContextRecord(
        id="ctx_1",
        model="m",
        tokenizer_digest="t",
        fingerprint="f",
        compression=Compression(),
        template="raw",
        roles=[],
        body=(0, 4),
        n_tokens=4,
        created_at=1.0,
        **fields,
    )
    client.hset(keys.context(record.id), mapping=whole_record(record))
    return record


@pytest.mark.parametrize("ended", ["ready", "failed"])
@pytest.mark.parametrize("late", ["prefilling", "compressing", "storing", "queued", "failed"])
def test_what_has_ended_stays_ended(client: Any, ended: Any, late: str) -> None:
    record, records = stored(client, status=ended, stored_bytes=7, raw_bytes=70), Records(client)
    before = client.hgetall(keys.usage(record.tenant))
    assert records.mark(record, status=late, error=Problem("late", "late"), processed=1)
    found = records.get(record.id)
    assert found is not None
    assert (found.status, found.error, found.processed) == (ended, None, 0)
    assert client.hgetall(keys.usage(record.tenant)) == before


@pytest.mark.parametrize("before", ["queued", "prefilling", "compressing", "storing", "failed", "ready"])
def test_ready_is_always_taken_and_a_touch_too(client: Any, before: Any) -> None:
    record, records = stored(client, status=before), Records(client)
    assert records.mark(record, status="ready", stored_bytes=9)
    records.touch(record)
    found = records.get(record.id)
    assert found is not None
    assert (found.status, found.stored_bytes) == ("ready", 9)
    assert found.last_used_at is not None


def test_a_deleted_context_is_not_brought_back(client: Any) -> None:
    record, records = stored(client), Records(client)
    client.delete(keys.context(record.id))
    assert not records.mark(record, status="ready")
    assert records.get(record.id) is None
