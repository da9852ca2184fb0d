"""The names that both processes' settings may have, so that a misspelt PRECIS_* variable stops the start of either."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "PRECIS_"
SERVICE_NAMES = frozenset(
    {
        "queue_url",
        "store_url",
        "host",
        "port",
        "max_body_bytes",
        "max_import_bytes",
        "compress_queue_limit",
        "answer_queue_limit",
        "default_ttl_s",
        "answer_timeout_s",
        "worker_grace_s",
        "default_policy",
        "auto_cache",
        "admin_key",
        "open",
        "quota_contexts",
        "quota_bytes",
        "quota_active",
        "quota_requests_per_minute",
        "encryption_keys",
        "log_format",
        "tracing",
    }
)
WORKER_NAMES = frozenset(
    {
        "queue_url",
        "store_url",
        "model",
        "model_name",
        "archive_url",
        "data_dir",
        "device",
        "dtype",
        "threads",
        "slots",
        "lease_s",
        "hot_bytes",
        "host_bytes",
        "seal_key",
        "encryption_keys",
        "log_format",
        "tracing",
        "metrics_port",
        "vllm_metrics",
        "role",
        "chunk_bytes",
    }
)
CLIENT_NAMES = frozenset({"url", "api_key"})


def refuse_unknown(environment: Iterable[str]) -> None:
    """Stop the start of a process whose environment has a name that no process knows.

    Raises:
        SystemExit: naming it.
    """
    unknown = unknown_names(environment)
    if unknown:
        raise SystemExit(f"unknown settings: {', '.join(unknown)}; see the README's list")


def unknown_names(environment: Iterable[str]) -> list[str]:
    """PRECIS_* names that no process knows."""
    known = {PREFIX + name.upper() for name in SERVICE_NAMES | WORKER_NAMES | CLIENT_NAMES}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
