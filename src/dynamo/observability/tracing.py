"""Spans of requests: their settings, which requests are recorded, and what is sent to a collector.

A span is built when its stage has ended, from times that were noted on the way, so a running request pays nothing for
it. Sampling is OpenTelemetry's `parentbased_traceidratio`: a trace that began in another process keeps its decision;
of the traces that begin here a share is recorded, chosen by the trace id, so all processes decide alike.

The variables are OpenTelemetry's own, and the original's switch. OpenTelemetry's packages are an extra and are not
imported while the export is off.
"""

import contextvars
import logging
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from dynamo.base import config, distribution, errors, ids
from dynamo.protocols import trace_context

AttributeValue = str | int | float | bool
SpanStart = tuple[trace_context.TraceContext | None, str | None]  # our span, id of its parent
StartSpan = Callable[[Mapping[str, str]], SpanStart]  # from the headers of a request
WallClock = Callable[[float], float]  # from times of the steady clock to seconds since 1970
_GRPC_PORT = ":4317"  # where collectors take OTLP over gRPC, which the original sends
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage of a request that has ended. Times are seconds since 1970."""

    name: str
    context: trace_context.TraceContext
    parent_id: str | None
    started_at: float
    ended_at: float
    kind: Literal["server", "internal"] = "internal"
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: str | None = None


class Stage(NamedTuple):
    """A part of a call, with its times on the steady clock; it has no span if one of them is None."""

    name: str
    began_at: float | None
    ended_at: float | None
    attributes: Mapping[str, AttributeValue] = types.MappingProxyType({})


class StageRecord:
    """What the code behind the handler of one call measures: stages of the call, and attributes of its span.

    Any thread may append to it.
    """

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.attributes: dict[str, AttributeValue] = {}


# That of the call which is being handled, None unless its spans are exported.
stage_record: contextvars.ContextVar[StageRecord | None] = contextvars.ContextVar(
    "stage_record", default=None
)


class SpanExporter(Protocol):
    """The destination of spans."""

    def export(self, spans: Sequence[Span]) -> None:
        """Send these spans later and return at once; spans that exceed the buffer are dropped."""
        ...

    def close(self) -> None:
        """Send the buffered spans within a bounded time. Blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Settings of the export of spans."""

    otel_export_enabled: bool = config.option(
        False, env="OTEL_EXPORT_ENABLED", help="send spans of requests to a collector"
    )
    otel_exporter_otlp_traces_endpoint: str | None = config.option(
        None,
        env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="URL of the collector, which takes OTLP over HTTP; by default OTEL_EXPORTER_OTLP_ENDPOINT with /v1/traces"
        " behind it, or http://localhost:4318/v1/traces",
    )
    otel_service_name: str = config.option(
        "dynamo", env="OTEL_SERVICE_NAME", help="name of this process in traces"
    )
    otel_traces_sampler_arg: float = config.option(
        1.0,
        env="OTEL_TRACES_SAMPLER_ARG",
        help="share of the traces beginning here to record, 0 to 1; a trace that a caller began keeps its own decision",
        least=0,
        most=1,
    )


def make_exporter(settings: TracingConfig) -> SpanExporter | None:
    """Return the exporter that the settings ask for, None if the export is off.

    Raises ConfigError for an endpoint that is no URL, or if OpenTelemetry is not installed.
    """
    if not settings.otel_export_enabled:
        return None
    endpoint = settings.otel_exporter_otlp_traces_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise errors.ConfigError(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: expected the URL of a collector that takes OTLP over HTTP, "
            f"like http://localhost:4318/v1/traces, got {endpoint!r}"
        )
    address = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if _GRPC_PORT in address:
        _logger.warning(
            "spans are sent by OTLP over HTTP, and %s is usually the port of OTLP over gRPC: expected an address like "
            "http://localhost:4318/v1/traces",
            address,
        )
    otlp = distribution.load_extra(
        "dynamo.observability.otlp", feature="OTEL_EXPORT_ENABLED", extra="otel"
    )
    exporter: SpanExporter = otlp.OtlpExporter(endpoint, settings.otel_service_name)
    return exporter


def forward_trace(headers: Mapping[str, str]) -> SpanStart:
    """Return the caller's trace context unchanged, for a process that exports no spans.

    A request without `traceparent` gets no trace, one with a malformed `traceparent` a new, unsampled trace.
    """
    if "traceparent" not in headers:
        return None, None
    return trace_context.read(headers) or _new_trace(0), None


def start_span(headers: Mapping[str, str], *, ratio: float) -> SpanStart:
    """Return the span that a request begins in this process, and the id of its parent span, if it has one."""
    parent = trace_context.read(headers)
    if parent is None:
        return _new_trace(ratio), None
    return parent.child(ids.new_span_id()), parent.span_id


def _new_trace(ratio: float) -> trace_context.TraceContext:
    trace_id = ids.new_trace_id()
    is_sampled = int(trace_id[16:], 16) < ratio * 2**64
    return trace_context.TraceContext(trace_id, ids.new_span_id(), int(is_sampled))


def wall_clock(now: float, wall: float) -> WallClock:
    """Convert times of the steady clock to seconds since 1970, given both clocks at one moment."""
    return lambda at: wall - (now - at)


def stage_spans(
    parent: trace_context.TraceContext,
    stages: Sequence[Stage],
    wall: WallClock,
) -> list[Span]:
    """Return a child span for each stage that has both times."""
    return [
        Span(
            name=name,
            context=parent.child(ids.new_span_id()),
            parent_id=parent.span_id,
            started_at=wall(began_at),
            ended_at=wall(ended_at),
            attributes=attributes,
        )
        for name, began_at, ended_at, attributes in stages
        if began_at is not None and ended_at is not None
    ]
