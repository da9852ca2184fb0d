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
STREAMS = Gauge("precis_open_streams", "Event streams being followed.")
