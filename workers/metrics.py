"""What a worker counts, next to the state that it counts. Names and buckets mean what vLLM's mean where it has them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from precis import __version__
from precis.wire.messages import Timings

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTHS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_RATIOS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_KLS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)

# answers
RUNNING = Gauge("precis_num_requests_running", "Answers being decoded.")
FIRST_TOKEN_SECONDS = Histogram(
    "precis_time_to_first_token_seconds",
    "From the request's tokens to the first token; cached: whether a snapshot was used.",
    ["cached"],
    buckets=_FIRST,
)
BETWEEN_TOKENS_SECONDS = Histogram(
    "precis_inter_token_latency_seconds", "Between two tokens of an answer.", buckets=_BETWEEN
)
WHOLE_SECONDS = Histogram(
    "precis_e2e_request_latency_seconds", "From the request's tokens to the end of the answer.", buckets=_WHOLE
)
QUEUE_SECONDS = Histogram("precis_request_queue_time_seconds", "Until a worker took an answer up.", buckets=_WHOLE)
QUERY_SECONDS = Histogram(
    "precis_request_prefill_time_seconds", "From then to the first token, loading included.", buckets=_WHOLE
)
DECODE_SECONDS = Histogram("precis_request_decode_time_seconds", "From the first token to the last.", buckets=_WHOLE)
FINISHED = Counter("precis_request_success_total", "Answers that ended well, by reason.", ["finished_reason"])
PROMPT_TOKENS = Counter("precis_prompt_tokens_total", "Tokens of prompts, cached ones too.")
GENERATION_TOKENS = Counter("precis_generation_tokens_total", "Tokens of answers.")
CACHE_QUERIES = Counter("precis_prefix_cache_queries_total", "Tokens of prompts that could have been cached.")
CACHE_HITS = Counter("precis_prefix_cache_hits_total", "Tokens of prompts that were not computed.")
PROMPT_LENGTH = Histogram("precis_request_prompt_tokens", "Tokens of a prompt.", buckets=_LENGTHS)
ANSWER_LENGTH = Histogram("precis_request_generation_tokens", "Tokens of an answer.", buckets=_LENGTHS)
STEP_TOKENS = Histogram("precis_iteration_tokens_total", "Tokens of one packed forward.", buckets=_STEP_TOKENS)
STEP_SECONDS = Histogram("precis_step_seconds", "One packed forward of the batch.", buckets=_SECONDS)
KV_USAGE = Gauge("precis_kv_cache_usage_perc", "Share of the memory for snapshots on the device; 1 = all.")
HOT_BYTES = Gauge("precis_hot_bytes", "Bytes of snapshots held by a worker, by tier: device, host.", ["tier"])

# snapshots
LOADS = Counter("precis_snapshot_loads_total", "Where an answer's snapshot came from.", ["origin"])
ARCHIVED_BYTES = Counter("precis_archived_bytes_total", "Of snapshots written to the archive.")
ARCHIVE_FAILURES = Counter("precis_archive_failures_total", "Failures of the archive: put, get, delete.", ["operation"])
LOAD_SECONDS = Histogram(
    "precis_snapshot_load_seconds",
    "Loading a snapshot from the store, by phase: fetch, decode.",
    ["phase"],
    buckets=_SECONDS,
)
LOADED_BYTES = Counter("precis_snapshot_loaded_bytes_total", "Bytes of snapshots fetched from the store.")
LOAD_FAILURES = Counter(
    "precis_snapshot_load_failures_total", "Snapshots that could not be used, by reason.", ["reason"]
)
RECOMPUTED = Counter("precis_recomputed_total", "Snapshots made again from source tokens, by reason.", ["reason"])
REUSED = Counter("precis_reused_total", "Snapshots made of stored ones: adopted (imported), tightened, grown.", ["how"])
STORE_SECONDS = Histogram("precis_snapshot_store_seconds", "Writing and publishing a snapshot.", buckets=_SECONDS)
STORED_BYTES = Counter(
    "precis_snapshot_bytes_total", "Bytes of contexts compressed, by kind: raw (full cache), stored, saved.", ["kind"]
)
RATIO = Histogram("precis_compression_ratio", "Bytes of the full cache to stored ones, per context.", buckets=_RATIOS)
FIDELITY = Histogram("precis_fidelity_kl", "Measured divergence per context, nats per token.", buckets=_KLS)
CONTEXT_TOKENS = Histogram("precis_context_tokens", "Tokens of a compressed context.", buckets=_LENGTHS)
STAGE_SECONDS = Histogram(
    "precis_context_stage_seconds",
    "Stages of a compression: queue, prefill, compress, store.",
    ["stage"],
    buckets=_SECONDS,
)

# jobs
JOBS = Counter("precis_jobs_total", "Jobs ended, by kind and outcome.", ["kind", "outcome"])
ERRORS = Counter("precis_worker_errors_total", "Errors of jobs, by code.", ["code"])
RECLAIMED = Counter("precis_jobs_lost_total", "Jobs given up because workers died on them.")
TOKENS = Counter("precis_tokens_total", "Tokens, by kind: prefilled, cached, decoded.", ["kind"])
BEAT = Gauge("precis_worker_beat_seconds", "Unix time of the last heartbeat.")
INFO = Gauge(
    "precis_worker_info", "1; what this worker is.", ["worker", "model_name", "device", "dtype", "role", "version"]
)
VERSION = __version__

# A series that begins with its first count has no rate for it: those that are known are there from the start.
for _counter, _labels in (
    (FIRST_TOKEN_SECONDS, ("true", "false")),
    (FINISHED, ("stop", "length")),
    (LOADS, ("memory", "host", "store", "archive")),
    (ARCHIVE_FAILURES, ("put", "get", "delete")),
    (LOAD_SECONDS, ("fetch", "decode")),
    (LOAD_FAILURES, ("missing", "corrupt", "stale")),
    (RECOMPUTED, ("missing", "corrupt", "stale", "session")),
    (REUSED, ("adopted", "tightened", "grown")),
    (STORED_BYTES, ("raw", "stored", "saved")),
    (STAGE_SECONDS, ("queue", "prefill", "compress", "store")),
    (TOKENS, ("prefilled", "cached", "decoded")),
):
    for _label in _labels:
        _counter.labels(_label)


def count_answer(
    reason: str, prompt_tokens: int, cached_tokens: int, n_tokens: int, timings: Timings, whole_s: float
) -> None:
    """Count an answer that ended well.

    Args:
        reason: "stop" or "length".
        prompt_tokens: all of them.
        cached_tokens: those that were not computed.
        n_tokens: of the answer.
        timings: as its client is told.
        whole_s: seconds from the request on.
    """
    FINISHED.labels(reason).inc()
    for counter, n in ((PROMPT_TOKENS, prompt_tokens), (CACHE_QUERIES, prompt_tokens), (CACHE_HITS, cached_tokens)):
        counter.inc(n)
    GENERATION_TOKENS.inc(n_tokens)
    PROMPT_LENGTH.observe(prompt_tokens)
    ANSWER_LENGTH.observe(n_tokens)
    WHOLE_SECONDS.observe(whole_s)
    QUEUE_SECONDS.observe(timings.queue_ms / 1000)
    QUERY_SECONDS.observe((timings.load_ms + timings.prefill_ms) / 1000)
    DECODE_SECONDS.observe(timings.decode_ms / 1000)
