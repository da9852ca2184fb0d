"""Every metric is driven by what it counts, and says the number that the answers say."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import service.metrics
import workers.metrics
from precis.wire import keys
from tests.stack import ADMIN_KEY, Stack, running_server, running_stack, wait_for
from workers.energy import EnergyMeter

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 30
EASY = {"policy": "kvzip", "keep_ratio": 0.5, "codec": "int8"}
EXACT = {"policy": "full", "codec": "raw16"}
UNDRIVEN = {
    "precis_archived_bytes",  # test_archive has an archive
    "precis_archive_failures",
    "precis_jobs_lost",  # test_failures kills workers
    "precis_store_evicted_keys",  # test_stores fills a server
}
Found = dict[str, float]


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[Stack]:
    environment = {"PRECIS_ADMIN_KEY": ADMIN_KEY, "PRECIS_VLLM_METRICS": "true", "PRECIS_AUTO_CACHE": "true"}
    with (
        running_server("--maxmemory", "200mb") as server,
        running_stack(server, tiny_folder, **environment) as stack,
    ):
        yield stack


def port_of(stack: Stack, name: str = "worker") -> str:
    found: str = re.findall(r"metrics=(\d+)", stack.log(name))[-1]
    return found


def scraped(text: str) -> Found:
    """Samples by name, summed over labels, and by name with labels."""
    found: Found = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
            found[sample.name + json.dumps(sample.labels, sort_keys=True)] += sample.value
    return found


def of_worker(stack: Stack) -> Found:
    return scraped(httpx.get(f"http://127.0.0.1:{port_of(stack)}/metrics").text)


def of_api(stack: Stack) -> Found:
    return scraped(stack.http().get("/metrics").text)


def labelled(found: Found, name: str, **labels: str) -> float:
    return found[name + json.dumps(labels, sort_keys=True)]


def upload(own: Stack, text: str, how: dict[str, Any] = EASY, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "compression": how, **fields}
    found: dict[str, Any] = own.http().post("/v1/contexts?wait=60", json=body).json()
    assert found["status"] == "ready", found
    return found


def ask(own: Stack, context: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"question": "Who jumps?", "max_tokens": 12, "ignore_eos": True, **fields}
    found: dict[str, Any] = own.http().post(f"/v1/contexts/{context['id']}/queries", json=body).json()
    return found


def chat(own: Stack, text: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    body = {"messages": [*messages, {"role": "user", "content": "Who?"}], "max_tokens": 4, **fields}
    return own.http().post("/v1/chat/completions", json=body)


def test_answers_are_counted_as_their_clients_are_told(own: Stack) -> None:
    context = upload(own, DOCUMENT)
    before = of_worker(own)
    answers = [ask(own, context) for _ in range(3)]
    alone = chat(own, "short", cache="off").json()
    after = of_worker(own)
    grown = {name: after[name] - before[name] for name in after}
    usages = [*(answer["usage"] for answer in answers), alone["usage"]]
    prompt, new = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached == 3 * context["usage"]["total_tokens"]
    for prefix in ("precis_", "vllm:"):
        assert grown[f"{prefix}prompt_tokens_total"] == grown[f"{prefix}prefix_cache_queries_total"] == prompt
        assert grown[f"{prefix}prefix_cache_hits_total"] == cached
        assert grown[f"{prefix}generation_tokens_total"] == new
        assert grown[f"{prefix}request_success_total"] == 4
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert grown[f"{prefix}{name}_seconds_count"] == 4, name
        assert grown[f"{prefix}time_to_first_token_seconds_count"] == 4
        between = sum(max(0, usage["completion_tokens"] - 1) for usage in usages)
        assert grown[f"{prefix}inter_token_latency_seconds_count"] == between
        assert grown[f"{prefix}request_prompt_tokens_sum"] == prompt
    assert labelled(after, "precis_time_to_first_token_seconds_count", cached="true") >= 3
    assert labelled(after, "precis_time_to_first_token_seconds_count", cached="false") >= 1
    vllm = [name for name in after if name.startswith("vllm:") and "{" in name]
    assert vllm
    assert all(json.loads(name[name.index("{") :])["model_name"] == context["model"] for name in vllm)
    assert after["precis_num_requests_running"] == 0
    assert 0 < after["precis_kv_cache_usage_perc"] < 1


def test_snapshots_are_counted_as_their_contexts_say(own: Stack) -> None:
    before = of_worker(own)
    context = upload(own, DOCUMENT + "counted")
    after = of_worker(own)
    storage = context["storage"]
    for kind, n_bytes in (
        ("raw", storage["raw_bytes"]),
        ("stored", storage["stored_bytes"]),
        ("saved", storage["raw_bytes"] - storage["stored_bytes"]),
    ):
        name = "precis_snapshot_bytes_total"
        assert labelled(after, name, kind=kind) - labelled(before, name, kind=kind) == n_bytes
    assert after["precis_compression_ratio_count"] - before["precis_compression_ratio_count"] == 1
    assert abs(after["precis_compression_ratio_sum"] - before["precis_compression_ratio_sum"] - storage["ratio"]) < 0.01
    kl = after["precis_fidelity_kl_sum"] - before["precis_fidelity_kl_sum"]
    assert abs(kl - context["fidelity"]["kl"]) < 1e-6
    for stage in ("queue", "prefill", "compress", "store"):
        name = "precis_context_stage_seconds_count"
        assert labelled(after, name, stage=stage) - labelled(before, name, stage=stage) == 1
    usage = own.http().get("/v1/admin/tenants/default").json()["usage"]
    api = of_api(own)
    assert labelled(api, "precis_tenant_bytes", tenant="default", kind="stored") == usage["stored_bytes"]
    assert labelled(api, "precis_context_bytes", kind="stored") == usage["stored_bytes"]
    assert labelled(api, "precis_contexts", state="all") == usage["contexts"]


def test_what_waits_is_seen_with_its_age(own: Stack) -> None:
    name = own.http().get("/v1/models").json()["data"][0]["id"]
    client = own.server.client()
    stream = keys.compress_jobs(name)
    own.kill("worker")
    client.xadd(stream, {"job": b"bad", "attempt": 0})
    time.sleep(1.1)
    api = of_api(own)
    assert labelled(api, "precis_queue_depth", queue=f"compress:{name}") == 1
    assert 1 <= labelled(api, "precis_queue_oldest_seconds", queue=f"compress:{name}") < 60
    own.start_worker()
    wait_for(lambda: not client.xlen(stream), 20)
    assert labelled(of_api(own), "precis_queue_oldest_seconds", queue=f"compress:{name}") == 0


def happened(own: Stack) -> tuple[Found, dict[str, Any]]:
    """What can happen, once; what workers counted that are gone, and a context."""
    http, client = own.http(), own.server.client()
    context = upload(own, DOCUMENT + "driven")
    ask(own, context)
    upload(own, DOCUMENT + "driven")  # exists already
    http.patch(f"/v1/contexts/{context['id']}", json={"compression": {"keep_ratio": 0.3}})
    wait_for(lambda: http.get(f"/v1/contexts/{context['id']}").json()["status"] == "ready", 30)
    with http.stream("GET", f"/v1/contexts/{context['id']}/events") as events:
        next(events.iter_lines())
        assert of_api(own)["precis_open_streams"] >= 0
    session = http.post(f"/v1/contexts/{context['id']}/sessions").json()["id"]
    ask(own, context, session=session)
    seen = dict(of_worker(own))
    own.kill("worker")
    own.start_worker()
    grown = upload(own, "Once upon a time. " * 20, EXACT)
    http.post(f"/v1/contexts/{grown['id']}/append?wait=60", json={"text": "And more."})
    ask(own, context)  # from the store
    piece = bytearray(client.hget(keys.snapshot(context["id"]), "1.0"))
    piece[9] ^= 1
    client.hset(keys.snapshot(context["id"]), "1.0", bytes(piece))
    seen |= {name: value for name, value in of_worker(own).items() if value}
    own.kill("worker")
    own.start_worker()
    ask(own, context)  # damaged: made again
    http.post(f"/v1/contexts/{context['id']}/score", json={"items": [{"prompt": "a", "continuation": "b"}]})
    grown = upload(own, "Once upon a time. " * 21, EXACT)
    http.post(f"/v1/contexts/{grown['id']}/append?wait=60", json={"text": "And more."})
    assert ask(own, {"id": grown["id"]}, messages=[]).get("code") == "invalid_request"
    for _ in range(2):
        chat(own, DOCUMENT + "auto")
    http.put("/v1/admin/tenants/default/quota", json={"max_bytes": 1})
    assert http.post("/v1/contexts", json={"text": DOCUMENT + "over", "compression": EASY}).status_code == 429
    http.put("/v1/admin/tenants/default/quota", json={"max_bytes": 10**9})
    upload(own, "short lived. " * 40, EXACT, ttl_s=1)
    wait_for(lambda: of_api(own)["precis_contexts_expired_total"] > 0, 20)
    failing = {"text": DOCUMENT + "failing", "compression": {"policy": "kvzip", "codec": "int8", "max_kl": 1e-12}}
    assert http.post("/v1/contexts?wait=60", json=failing).json()["error"]["code"] == "bound_not_reached"
    return seen, grown


def test_every_metric_is_driven(own: Stack) -> None:
    """No metric of either process is 0 after everything happened."""
    seen, grown = happened(own)
    http = own.http()
    body = {"question": "Go on", "max_tokens": 30000, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"/v1/contexts/{grown['id']}/queries", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        now, api = of_worker(own), of_api(own)
        assert now["precis_num_requests_running"] == 1
        assert api["precis_open_streams"] >= 1
    worker = {**seen, **{name: value for name, value in now.items() if value}}
    wait_for(lambda: of_worker(own)["precis_num_requests_running"] == 0, 20)
    for module, found in ((workers.metrics, worker), (service.metrics, {**of_api(own), **driven_now(api)})):
        for name, metric in vars(module).items():
            if not isinstance(metric, prometheus_client.metrics.MetricWrapperBase):
                continue
            stem = metric._name
            samples = [found.get(stem + end, 0) for end in ("", "_total", "_count")]
            assert any(samples) or stem in UNDRIVEN or stem == "precis_queue_oldest_seconds", (name, stem)
    assert labelled(defaultdict(float, worker), "precis_recomputed_total", reason="corrupt") == 1
    assert labelled(defaultdict(float, worker), "precis_snapshot_load_failures_total", reason="corrupt") == 1


def driven_now(found: Found) -> Found:
    """Gauges that are 0 again once nothing runs."""
    return {name: found[name] for name in ("precis_open_streams", "precis_queue_depth") if found[name]}


def test_energy_is_told_where_the_library_tells_it(tmp_path: Path) -> None:
    assert list(EnergyMeter(0, str(tmp_path / "none.so")).collect()) == []
    assert list(EnergyMeter(0, "libc.so.6").collect()) == []  # a library without those functions
