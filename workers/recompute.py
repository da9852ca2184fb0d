"""In any doubt about a stored snapshot: make it again from the source tokens, count it, and say so."""

from __future__ import annotations

import structlog

from precis.core import Snapshot
from precis.errors import SnapshotError
from precis.full_cache import Between
from precis.wire.records import ContextRecord
from workers import metrics
from workers.cache import SnapshotCache
from workers.compress import Compressor


def make_again(
    cache: SnapshotCache, compressor: Compressor, record: ContextRecord, why: SnapshotError, between: Between
) -> tuple[Snapshot, str]:
    """Compress a context anew and publish the result.

    Args:
        cache: holds the new snapshot afterwards.
        compressor: makes it.
        record: of the context.
        why: what was wrong with the stored one.
        between: called between chunks of work; raises to stop.

    Returns:
        The snapshot, and what the answer says of it.

    Raises:
        SnapshotMissing, SnapshotStale: if the source tokens cannot be used either.
    """
    reason = why.code.removeprefix("snapshot_")
    metrics.RECOMPUTED.labels(reason).inc()
    structlog.get_logger("worker").warning("recomputing", context=record.id, reason=reason)
    cache.drop(record.id)
    made = compressor.make(record, between)
    compressor.publish(record, made)
    compressor.mark_ready(record, made, record.timings)
    cache.keep(record.id, made.snapshot)
    return made.snapshot, f"recomputed; {reason}"
