"""One trace per request over both processes: OpenTelemetry's API, which does nothing until `configure` was called.

A trace travels as the header `traceparent` (W3C Trace Context) from the client, and in the job to the worker. Spans
carry ids, counts, times and error codes, never text of documents, prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000


def configure(service: str, *, on: bool) -> None:
    """Send spans to the OTLP endpoint of OTEL_EXPORTER_OTLP_ENDPOINT, by HTTP, if tracing is on.

    Raises:
        SystemExit: if what sends them is not installed.
    """
    if not on:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 — an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit("PRECIS_TRACING needs pip install 'precis-kv[tracing]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def carrier() -> str:
    """The present span as `traceparent`; empty if there is none."""
    found: dict[str, str] = {}
    _PROPAGATOR.inject(found)
    return found.get("traceparent", "")


@contextmanager
def span(name: str, parent: str, **attributes: str | int) -> Iterator[Span]:
    """A span around a block, below `parent`, a `traceparent`; without one that can be read it begins a trace."""
    with _tracer().start_as_current_span(name, _below(parent), SpanKind.CONSUMER, attributes) as found:
        yield found


def past(
    name: str, parent: str | None, stages: Mapping[str, float], failed: str, **attributes: str | int | float
) -> None:
    """A span that ends now, of stages that followed each other.

    Args:
        name: of the span.
        parent: `traceparent`; None for the present span.
        stages: milliseconds of each; those of 0 are left out.
        failed: code of an error; empty for none.
        attributes: of the span.
    """
    end = time.time_ns()
    start = end - int(sum(stages.values()) / 1000 * _NS)
    found = _tracer().start_span(name, _below(parent), SpanKind.CONSUMER, attributes, start_time=start)
    inside = trace.set_span_in_context(found)
    for stage, ms in stages.items():
        if ms > 0:
            stop = start + int(ms / 1000 * _NS)
            _tracer().start_span(stage.removesuffix("_ms"), inside, start_time=start).end(stop)
            start = stop
    if failed:
        fail(found, failed)
    found.end(end)


def fail(found: Span, code: str) -> None:
    """Let a span say that it failed, by which code."""
    found.set_attribute("error.type", code)
    found.set_status(Status(StatusCode.ERROR))


def _tracer() -> trace.Tracer:
    return trace.get_tracer("precis")


def _below(parent: str | None) -> context.Context | None:
    return None if parent is None else _PROPAGATOR.extract({"traceparent": parent})
