"""The same numbers under vLLM's names, for dashboards and autoscalers that know those; off by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_SAME = (
    "num_requests_running",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
)
_OURS, _THEIRS = "precis_", "vllm:"


class Aliases(Collector):
    """Copies of this process' metrics, with the labels that vLLM's have."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> list[Metric]:
        """Nothing: what is collected depends on nothing that is registered here."""
        return []

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        wanted = {_OURS + name for name in _SAME}
        for family in REGISTRY._collector_to_names:
            if family is self:
                continue
            for found in family.collect():
                if found.name in wanted:
                    yield self._renamed(found)

    def _renamed(self, found: Metric) -> Metric:
        made = Metric(found.name.replace(_OURS, _THEIRS, 1), found.documentation, found.type)
        merged: dict[tuple[Any, ...], float] = {}
        for sample in found.samples:  # vLLM does not tell cached and uncached first tokens apart
            labels = {name: value for name, value in sample.labels.items() if name != "cached"}
            key = (sample.name, tuple(sorted(labels.items())))
            merged[key] = merged.get(key, 0.0) + (sample.value if not sample.name.endswith("_created") else 0.0)
        for (name, labels), value in merged.items():
            if not name.endswith("_created"):
                made.add_sample(name.replace(_OURS, _THEIRS, 1), {**dict(labels), **self._labels}, value)
        return made
