"""Structs <-> bytes for jobs, events, cards and records; the only place that chooses an encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from precis.wire.messages import Event, Job, ModelCard
from precis.wire.records import ContextRecord, SessionState, WorkerRecord

_T = TypeVar("_T")
_FIELDS = {field.name: field for field in msgspec.structs.fields(ContextRecord)}


def encode(value: Job | Event | ModelCard | WorkerRecord | SessionState) -> bytes:
    """To MessagePack."""
    return msgspec.msgpack.encode(value)


def decode_job(data: bytes) -> Job:
    """A job; msgspec.ValidationError names what is wrong."""
    return msgspec.msgpack.decode(data, type=Job)


def decode_event(data: bytes) -> Event:
    """An event."""
    return msgspec.msgpack.decode(data, type=Event)


def decode(data: bytes, kind: type[_T]) -> _T:
    """A struct of a known kind."""
    return msgspec.msgpack.decode(data, type=kind)


def record_fields(**changes: Any) -> dict[str, bytes]:
    """Record fields as stored: one JSON value each.

    Raises:
        KeyError: if there is no such field.
    """
    return {_FIELDS[name].encode_name: msgspec.json.encode(value) for name, value in changes.items()}


def whole_record(record: ContextRecord) -> dict[str, bytes]:
    """Every field of a record as stored."""
    return record_fields(**{name: getattr(record, name) for name in _FIELDS})


def decode_record(stored: Mapping[bytes, bytes]) -> ContextRecord | None:
    """A record from its hash; None if there is none."""
    if not stored:
        return None
    return msgspec.convert({k.decode(): msgspec.json.decode(v) for k, v in stored.items()}, ContextRecord)
