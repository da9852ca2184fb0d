"""Spans as a collector gets them: one trace per request over both processes, and no text of anybody's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from precis.wire import traces
from tests.stack import Stack, running_server, running_stack, wait_for

SECRET, QUESTION = "wombat", "quokka"
BODY = {"text": f"The {SECRET} sleeps by day. " * 12, "compression": {"policy": "full", "codec": "raw16"}}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass
class Collector:
    """What was sent so far."""

    spans: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    raw: bytes = b""

    def of(self, trace: str) -> dict[str, tuple[str, Any]]:
        """Service and span by name."""
        return {span.name: (service, span) for service, span in self.spans.get(trace, [])}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            found.raw += data
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.spans.setdefault(span.trace_id.hex(), []).append((service, span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def own(collector: tuple[Collector, str], tiny_folder: Path) -> Iterator[Stack]:
    telling = {
        "PRECIS_TRACING": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector[1],
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with running_server() as server, running_stack(server, tiny_folder, **telling) as stack:
        yield stack


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def below(child: Any, parent: Any) -> bool:
    within: bool = parent.start_time_unix_nano <= child.start_time_unix_nano + 50_000_000
    return within and child.parent_span_id == parent.span_id


def test_one_trace_from_the_client_to_the_worker(own: Stack, collector: tuple[Collector, str]) -> None:
    http, found = own.http(), collector[0]
    sent = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    context = http.post("/v1/contexts?wait=60", json=BODY, headers=sent).json()
    assert context["status"] == "ready", context
    uploaded = wait_for(
        lambda: {"compress", "snapshot", "POST /v1/contexts"} <= set(found.of(TRACE)) and found.of(TRACE)
    )
    assert uploaded["POST /v1/contexts"][0] == "precis-api"
    assert uploaded["compress"][0] == uploaded["snapshot"][0] == "precis-worker"
    assert uploaded["POST /v1/contexts"][1].parent_span_id.hex() == "00f067aa0ba902b7"
    assert below(uploaded["compress"][1], uploaded["POST /v1/contexts"][1])
    assert below(uploaded["snapshot"][1], uploaded["compress"][1])
    assert {"prefill", "store"} <= set(uploaded)
    assert attributes(uploaded["compress"][1])["precis.job"] == context["id"]

    url = f"/v1/contexts/{context['id']}/queries"
    answer = http.post(
        url, json={"question": f"Where is the {QUESTION}?", "max_tokens": 4}, headers={"x-request-id": "r1"}
    )
    assert answer.status_code == 200
    name = "POST /v1/contexts/{context_id}/queries"
    trace = wait_for(lambda: next((t for t in found.spans if {name, "answer"} <= set(found.of(t))), None))
    spans = found.of(trace)
    assert spans["answer"][0] == "precis-worker"
    assert below(spans["answer"][1], spans[name][1])
    assert {"prefill", "decode"} <= set(spans)
    assert attributes(spans[name][1])["precis.request"] == "r1"
    assert attributes(spans[name][1])["http.response.status_code"] == 200
    assert attributes(spans["answer"][1])["precis.tokens"] == answer.json()["usage"]["completion_tokens"]


def test_failures_say_their_code(own: Stack, collector: tuple[Collector, str]) -> None:
    http, found = own.http(), collector[0]
    context = http.post("/v1/contexts?wait=60", json=BODY).json()
    own.server.client().delete(f"{{precis}}:tokens:{context['id']}", f"snapshot:{{{context['id']}}}")
    own.kill("worker", 15)
    own.start_worker()
    trace = "aaf92f3577b34da6a3ce929d0e0e4736"
    told = http.post(
        f"/v1/contexts/{context['id']}/queries",
        json={"question": "Who?", "max_tokens": 4},
        headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"},
    )
    assert told.json()["code"] == "snapshot_missing"
    span = wait_for(lambda: found.of(trace).get("answer"))[1]
    assert (span.status.code, attributes(span)["error.type"]) == (2, "snapshot_missing")


def test_no_text_leaves_and_machines_that_ask_all_the_time_are_left_out(
    own: Stack, collector: tuple[Collector, str]
) -> None:
    http = own.http()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert http.get(path).status_code == 200
    assert http.post("/v1/contexts", json={"text": 5, "name": [SECRET]}).status_code == 422
    assert http.post("/v1/contexts", content=f'{{"text": {SECRET}').status_code == 422
    http.get("/v1/models", headers={"traceparent": "nonsense"})
    wait_for(lambda: b"GET /v1/models" in collector[0].raw)
    names = {span.name for spans in collector[0].spans.values() for _, span in spans}
    assert not any("healthz" in name or "readyz" in name or "metrics" in name for name in names)
    assert SECRET.encode() not in collector[0].raw
    assert QUESTION.encode() not in collector[0].raw


def test_without_what_sends_them_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SystemExit, match=r"precis-kv\[tracing\]"):
        traces.configure("precis-api", on=True)


def test_a_collector_that_is_away_costs_nothing_but_its_spans(tiny_folder: Path) -> None:
    telling = {"PRECIS_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with running_server() as server, running_stack(server, tiny_folder, **telling) as stack:
        http: httpx.Client = stack.http()
        assert http.post("/v1/contexts?wait=60", json=BODY).json()["status"] == "ready"
