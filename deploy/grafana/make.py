"""Writes the dashboards beside this file: `python deploy/grafana/make.py`. What they show is said here, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        queries: of expression and legend.
        unit: Grafana's name of it.
        kind: "timeseries", "stat", "bargauge" or "heatmap".
        text: what it means, and when to worry.
    """

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def quantiles(name: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """50th, 90th and 99th percentile of a histogram."""
    inside = f"{{{where}}}" if where else ""
    grouped = f"le, {by}" if by else "le"
    told = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({grouped}) (rate({name}_bucket{inside}[$__rate_interval])))",
            f"p{q * 100:g}{told}",
        )
        for q in (0.5, 0.9, 0.99)
    )


def rate(name: str, by: str) -> tuple[tuple[str, str], ...]:
    """A counter's rate by a label."""
    return ((f"sum by ({by}) (rate({name}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def one(expression: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    """A single query."""
    return ((expression, legend),)


_SAVED = "max(precis_context_bytes{kind='raw'}) - max(precis_context_bytes{kind='stored'})"
_HIT_RATE = "sum(rate(precis_prefix_cache_hits_total[$__rate_interval])) / sum(rate(precis_prefix_cache_queries_total[$__rate_interval]))"

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "Precis: overview",
        (
            Panel(
                "Memory saved now",
                "Bytes of full KV cache that ready contexts would take, less what they take.",
                "bytes",
                one(_SAVED),
                "stat",
            ),
            Panel(
                "Times smaller",
                "Full cache over stored bytes, all ready contexts.",
                "x",
                one("max(precis_context_bytes{kind='raw'}) / max(precis_context_bytes{kind='stored'})"),
                "stat",
            ),
            Panel(
                "Tokens from snapshots",
                "Share of prompt tokens that were not computed.",
                "percentunit",
                one(_HIT_RATE),
                "stat",
            ),
            Panel(
                "Contexts",
                "Stored, and waiting or in work.",
                "short",
                one("max by (state) (precis_contexts)", "{{state}}"),
                "stat",
            ),
            Panel("Workers", "Alive. None with a backlog is an alert.", "short", one("max(precis_workers)"), "stat"),
            Panel(
                "Recomputed",
                "Snapshots that had to be made again, per second. Anything steady deserves a look at the reason.",
                "ops",
                one("sum(rate(precis_recomputed_total[$__rate_interval])) or vector(0)"),
                "stat",
            ),
            Panel(
                "Bytes: full cache and stored",
                "What ready contexts would take, and take.",
                "bytes",
                one("max by (kind) (precis_context_bytes)", "{{kind}}"),
            ),
            Panel(
                "First token",
                "From the request to the first token, with a snapshot (true) and without.",
                "s",
                quantiles("precis_time_to_first_token_seconds", "cached"),
            ),
            Panel(
                "Tokens per second",
                "Cached, prefilled, decoded, all workers.",
                "short",
                rate("precis_tokens_total", "kind"),
            ),
            Panel("Requests", "By status.", "reqps", rate("precis_http_requests_total", "status")),
            Panel(
                "Errors answered",
                "By code.",
                "ops",
                one("sum by (code) (rate(precis_errors_total[$__rate_interval]))", "{{code}}"),
            ),
            Panel(
                "Jobs ended",
                "By kind and outcome.",
                "ops",
                one("sum by (kind, outcome) (rate(precis_jobs_total[$__rate_interval]))", "{{kind}} {{outcome}}"),
            ),
        ),
    ),
    "latency": (
        "Precis: latency",
        (
            Panel(
                "First token, from a snapshot",
                "Percentiles of answers on a context.",
                "s",
                quantiles("precis_time_to_first_token_seconds", where="cached='true'"),
            ),
            Panel(
                "First token, without",
                "Percentiles of prompts that were read as they came.",
                "s",
                quantiles("precis_time_to_first_token_seconds", where="cached='false'"),
            ),
            Panel("Between tokens", "Percentiles.", "s", quantiles("precis_inter_token_latency_seconds")),
            Panel(
                "Whole answer",
                "From the request to the last token.",
                "s",
                quantiles("precis_e2e_request_latency_seconds"),
            ),
            Panel(
                "Waiting for a worker",
                "Percentiles. Rising means: more workers, or more slots.",
                "s",
                quantiles("precis_request_queue_time_seconds"),
            ),
            Panel(
                "Loading and reading the question",
                "From a worker taking an answer up to its first token.",
                "s",
                quantiles("precis_request_prefill_time_seconds"),
            ),
            Panel(
                "Decoding", "From the first token to the last.", "s", quantiles("precis_request_decode_time_seconds")
            ),
            Panel("One step of the batch", "A packed forward.", "s", quantiles("precis_step_seconds")),
            Panel(
                "First tokens over time",
                "How answers spread.",
                "s",
                one("sum by (le) (increase(precis_time_to_first_token_seconds_bucket[$__rate_interval]))", "{{le}}"),
                "heatmap",
            ),
        ),
    ),
    "queue": (
        "Precis: queue and workers",
        (
            Panel(
                "Waiting and running",
                "Jobs per queue.",
                "short",
                one("max by (queue) (precis_queue_depth)", "{{queue}}"),
            ),
            Panel(
                "Oldest job that nobody took",
                "Age. The signal to scale by.",
                "s",
                one("max by (queue) (precis_queue_oldest_seconds)", "{{queue}}"),
            ),
            Panel("Answers being decoded", "Per worker.", "short", one("precis_num_requests_running", "{{instance}}")),
            Panel(
                "Tokens per step",
                "Percentiles: how full batches are.",
                "short",
                quantiles("precis_iteration_tokens_total"),
            ),
            Panel(
                "Who got answers",
                "The holder of the snapshot, a spill because holders were busy, or any.",
                "ops",
                rate("precis_affinity_total", "outcome"),
            ),
            Panel(
                "Refused for want of room",
                "Demand that was not met, by reason.",
                "ops",
                rate("precis_rejected_requests_total", "reason"),
            ),
            Panel(
                "Seconds since the last heartbeat",
                "Per worker. Beyond the lease its jobs go to others.",
                "s",
                one("time() - precis_worker_beat_seconds", "{{instance}}"),
            ),
            Panel(
                "Workers",
                "What they are.",
                "short",
                one("sum by (model_name, device, role) (precis_worker_info)", "{{model_name}} {{device}} {{role}}"),
            ),
            Panel("Errors in workers", "By code.", "ops", rate("precis_worker_errors_total", "code")),
        ),
    ),
    "storage": (
        "Precis: storage",
        (
            Panel(
                "Memory of the servers",
                "Used and bound, queue and store.",
                "bytes",
                one(
                    "max by (server, kind) (precis_store_memory_bytes)",
                    "{{server}} {{kind}}",
                ),
            ),
            Panel(
                "Keys evicted",
                "Since a server's start. Snapshots that were evicted are made again when asked.",
                "short",
                one(
                    "max by (server) (precis_store_evicted_keys)",
                    "{{server}}",
                ),
            ),
            Panel(
                "Where snapshots came from",
                "Memory, host, store, archive.",
                "ops",
                rate("precis_snapshot_loads_total", "origin"),
            ),
            Panel(
                "Loading from the store",
                "By phase: fetching, decoding.",
                "s",
                quantiles("precis_snapshot_load_seconds", "phase"),
            ),
            Panel(
                "Fetched",
                "Bytes of snapshots per second.",
                "Bps",
                one("sum(rate(precis_snapshot_loaded_bytes_total[$__rate_interval]))"),
            ),
            Panel("Writing a snapshot", "Percentiles.", "s", quantiles("precis_snapshot_store_seconds")),
            Panel(
                "Could not be used",
                "By reason. corrupt is an alert.",
                "ops",
                rate("precis_snapshot_load_failures_total", "reason"),
            ),
            Panel(
                "Archive: what failed",
                "Per second, by operation. What cannot be read from there is made again.",
                "ops",
                rate("precis_archive_failures_total", "operation"),
            ),
            Panel("Held by workers", "Bytes by tier.", "bytes", one("sum by (tier) (precis_hot_bytes)", "{{tier}}")),
            Panel(
                "Memory for snapshots in use",
                "Share of each worker's.",
                "percentunit",
                one("precis_kv_cache_usage_perc", "{{instance}}"),
            ),
        ),
    ),
    "tenants": (
        "Precis: tenants",
        (
            Panel(
                "Stored by tenant",
                "Bytes of ready contexts.",
                "bytes",
                one("max by (tenant) (precis_tenant_bytes{kind='stored'})", "{{tenant}}"),
            ),
            Panel(
                "Saved by tenant",
                "Full cache less stored.",
                "bytes",
                one(
                    "max by (tenant) (precis_tenant_bytes{kind='raw'}) - max by (tenant) (precis_tenant_bytes{kind='stored'})",
                    "{{tenant}}",
                ),
            ),
            Panel(
                "Quota",
                "Bytes that each may store; 0: any number.",
                "bytes",
                one("max by (tenant) (precis_tenant_quota_bytes)", "{{tenant}}"),
            ),
        ),
    ),
    "compression": (
        "Precis: compression and quality",
        (
            Panel("Times smaller, per context", "Percentiles.", "x", quantiles("precis_compression_ratio")),
            Panel(
                "Divergence, per context",
                "KL to the full cache, nats per token. Above 0.1 answers begin to differ.",
                "short",
                quantiles("precis_fidelity_kl"),
            ),
            Panel("Tokens per context", "Percentiles.", "short", quantiles("precis_context_tokens")),
            Panel(
                "Stages of an upload",
                "Mean seconds of each.",
                "s",
                one(
                    "sum by (stage) (rate(precis_context_stage_seconds_sum[$__rate_interval])) / sum by (stage) (rate(precis_context_stage_seconds_count[$__rate_interval]))",
                    "{{stage}}",
                ),
            ),
            Panel(
                "Bytes compressed",
                "Per second: full cache, stored, saved.",
                "Bps",
                rate("precis_snapshot_bytes_total", "kind"),
            ),
            Panel("Made again", "By reason.", "ops", rate("precis_recomputed_total", "reason")),
            Panel("Made of stored snapshots", "Adopted, tightened, grown.", "ops", rate("precis_reused_total", "how")),
            Panel("Uploads", "New, or there already.", "ops", rate("precis_contexts_created_total", "outcome")),
            Panel(
                "Stored by themselves",
                "Beginnings of chats that came twice.",
                "ops",
                rate("precis_auto_cached_total", "outcome"),
            ),
        ),
    ),
    "gpu": (
        "Precis: GPU",
        (
            Panel(
                "Power",
                "Watts that the workers' GPUs take, from NVML.",
                "watt",
                one("sum by (instance) (rate(precis_energy_joules_total[$__rate_interval]))", "{{instance}}"),
            ),
            Panel(
                "Energy per generated token",
                "Joules.",
                "joule",
                one(
                    "sum(rate(precis_energy_joules_total[$__rate_interval])) / sum(rate(precis_generation_tokens_total[$__rate_interval]))"
                ),
            ),
            Panel("Memory used", "By DCGM's exporter, if it runs.", "decmbytes", one("DCGM_FI_DEV_FB_USED", "{{gpu}}")),
            Panel(
                "Streaming multiprocessors active",
                "By DCGM's exporter.",
                "percentunit",
                one("DCGM_FI_PROF_SM_ACTIVE", "{{gpu}}"),
            ),
        ),
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    """In Grafana's JSON."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"precis-{name}",
        "title": title,
        "tags": ["precis"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "DS_PROMETHEUS",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                }
            ]
        },
        "links": [
            {
                "title": "Precis",
                "type": "dashboards",
                "tags": ["precis"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, _PER_ROW)
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    elif panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend or panel.title,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(json.dumps(dashboard(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
