"""What a worker counts, next to the state that it counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)

JOBS = Counter("precis_jobs_total", "Jobs ended, by kind and outcome.", ["kind", "outcome"])
ERRORS = Counter("precis_worker_errors_total", "Errors of jobs, by code.", ["code"])
LOADS = Counter("precis_snapshot_loads_total", "Where an answer's snapshot came from.", ["origin"])
RECOMPUTED = Counter("precis_recomputed_total", "Snapshots made again from source tokens, by reason.", ["reason"])
REUSED = Counter("precis_reused_total", "Snapshots made of stored ones: adopted (imported), tightened, grown.", ["how"])
RECLAIMED = Counter("precis_jobs_lost_total", "Jobs given up because workers died on them.")
PREFILL_SECONDS = Histogram("precis_prefill_seconds", "Prefill of a document.", buckets=_SECONDS)
COMPRESS_SECONDS = Histogram("precis_compress_seconds", "Everything from prefill to stored.", buckets=_SECONDS)
FIRST_TOKEN_SECONDS = Histogram("precis_first_token_seconds", "From request to first token.", buckets=_SECONDS)
STEP_SECONDS = Histogram("precis_step_seconds", "One packed forward of the batch.", buckets=_SECONDS)
TOKENS = Counter("precis_tokens_total", "Tokens, by kind: prefilled, cached, decoded.", ["kind"])
BATCH = Gauge("precis_batch_size", "Answers being decoded.")
HOT_BYTES = Gauge("precis_hot_bytes", "Bytes of snapshots held by a worker, by tier: device, host.", ["tier"])
STORED_BYTES = Counter("precis_snapshot_bytes_total", "Bytes of contexts compressed, by kind: raw, stored.", ["kind"])
BEAT = Gauge("precis_worker_beat_seconds", "Unix time of the last heartbeat.")
