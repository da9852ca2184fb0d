"""What the API counts, next to the state that it counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)

REQUESTS = Counter("precis_http_requests_total", "Requests, by route and status.", ["method", "route", "status"])
REQUEST_SECONDS = Histogram("precis_http_request_seconds", "Until the response began.", ["route"], buckets=_SECONDS)
ERRORS = Counter("precis_errors_total", "Errors answered, by code.", ["code"])
CONTEXTS_CREATED = Counter("precis_contexts_created_total", "Uploads, by outcome: new, existing.", ["outcome"])
AUTO_CACHED = Counter(
    "precis_auto_cached_total", "Beginnings sent twice, by outcome: stored, there, or a code.", ["outcome"]
)
EXPIRED = Counter("precis_contexts_expired_total", "Contexts that reached their expiry.")
QUEUE_DEPTH = Gauge("precis_queue_depth", "Jobs waiting or running; take the max over API processes.", ["queue"])
WORKERS = Gauge("precis_workers", "Live workers; take the max over API processes.")
CONTEXT_BYTES = Gauge("precis_context_bytes", "Bytes of ready contexts: raw = full cache, stored.", ["kind"])
QUEUE_OLDEST = Gauge(
    "precis_queue_oldest_seconds", "Age of the oldest job that no worker has taken; take the max.", ["queue"]
)
CONTEXTS = Gauge("precis_contexts", "Contexts, by state: all, active (waiting or in work).", ["state"])
TENANT_BYTES = Gauge("precis_tenant_bytes", "Bytes of a tenant's ready contexts: raw, stored.", ["tenant", "kind"])
TENANT_QUOTA = Gauge("precis_tenant_quota_bytes", "Bytes that a tenant may store; 0: any number.", ["tenant"])
STORE_MEMORY = Gauge(
    "precis_store_memory_bytes",
    "Memory of the servers, by server (queue, store) and kind (used, max).",
    ["server", "kind"],
)
STORE_EVICTED = Gauge("precis_store_evicted_keys", "Keys that a server evicted since its start.", ["server"])
REJECTED = Counter(
    "precis_rejected_requests_total",
    "Requests refused for want of room, workers or quota: demand that was not met.",
    ["reason"],
)
AFFINITY = Counter(
    "precis_affinity_total", "Answers, by who got them: holder of the snapshot, spill (holders busy), any.", ["outcome"]
)
INFO = Gauge("precis_api_info", "1; the version of this API process.", ["version"])
STREAMS = Gauge("precis_open_streams", "Event streams being followed.")

# A series that begins with its first count has no rate for it: those that are known are there from the start.
for _counter, _labels in (
    (CONTEXTS_CREATED, ("new", "existing")),
    (AUTO_CACHED, ("stored", "there")),
    (AFFINITY, ("holder", "spill", "any")),
    (REJECTED, ("queue_full", "no_worker", "store_full", "quota_exceeded", "rate_limited", "shutting_down")),
):
    for _label in _labels:
        _counter.labels(_label)
