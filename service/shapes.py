"""How contexts look to clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from precis.wire.records import ContextRecord, Source
from service.records import expired


def stamp(seconds: float | None) -> str | None:
    """Unix time as RFC 3339."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def context_out(record: ContextRecord) -> dict[str, Any]:
    """The context object."""
    gone = expired(record)
    ratio = round(record.raw_bytes / record.stored_bytes, 3) if record.stored_bytes else None
    fidelity = record.fidelity
    return {
        "id": record.id,
        "object": "context",
        "status": "expired" if gone else record.status,
        "progress": {"processed": record.processed, "total": record.n_tokens},
        "model": record.model,
        "fingerprint": record.fingerprint,
        "policy": _policy_out(record),
        "template": record.template,
        "name": record.name,
        "metadata": record.metadata,
        "pinned": record.pinned,
        "created_at": stamp(record.created_at),
        "expire_time": stamp(record.expire_at),
        "last_used_at": stamp(record.last_used_at),
        "usage": {"total_tokens": record.n_tokens},
        "storage": {
            "raw_bytes": record.raw_bytes,
            "stored_bytes": 0 if gone else record.stored_bytes,
            "ratio": ratio,
            "kept_ratio": kept_ratio(record),
            "tier": None if gone or record.status != "ready" else "redis",
        },
        "fidelity": None
        if fidelity is None
        else {"kl": fidelity.kl, "top1_agreement": fidelity.top1_agreement, "n_tokens": fidelity.n_tokens},
        "timings": record.timings,
        **({"parts": record.parts} if record.parts else {}),
        **({"part_of": record.part_of} if record.part_of else {}),
        "source": None if record.source is None else source_out(record.source),
        "error": None if record.error is None else {"code": record.error.code, "detail": record.error.detail},
    }


def source_out(source: Source) -> dict[str, Any]:
    """The file as clients see it; pages as the characters at which they begin."""
    pages = {"page_starts": source.page_starts} if source.page_starts else {}
    return {"kind": source.kind, "bytes": source.n_bytes, **pages}


def _policy_out(record: ContextRecord) -> dict[str, Any]:
    """The policy as it was asked for; questions in words."""
    found: dict[str, Any] = dict(record.compression.parameters())
    if record.compression.probes:
        found["probes"] = list(record.compression.probes)
    return found


def kept_ratio(record: ContextRecord) -> float | None:
    """Share of all entries that the snapshot holds, which a bound or the method may have found; None until ready."""
    if not record.head_counts:
        return None
    heads = [count for layer in record.head_counts for count in layer]
    return round(sum(heads) / (len(heads) * record.n_tokens), 4)
