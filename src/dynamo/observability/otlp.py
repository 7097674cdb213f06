"""The exporter of spans to an OpenTelemetry collector, as OTLP over HTTP; the only module that imports opentelemetry.

The SDK batches, sends and retries in a thread of its own. It gets spans that have ended (`ReadableSpan`): starting and
ending each of them in its tracer would cost the event loop six times as much (docs/decisions/0009-spans-when-over.md).
"""

import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from dynamo.observability import tracing
from dynamo.protocols import trace_context

_KINDS = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NANOSECONDS = 1e9
CLOSE_S = 1.0


class OtlpExporter:
    """An exporter to one collector, None: that of the SDK's variables. It drops spans beyond 2048 in its buffer."""

    def __init__(self, endpoint: str | None, service: str) -> None:
        self._resource = Resource.create({"service.name": service})
        self._sender = OTLPSpanExporter(endpoint=endpoint)
        self._batches = BatchSpanProcessor(self._sender)

    def export(self, spans: Sequence[tracing.Span]) -> None:
        """Queue the spans for the SDK's thread."""
        for span in spans:
            context = _span_context(span.context, span.context.span_id)
            parent = _span_context(span.context, span.parent_id) if span.parent_id else None
            code = trace.StatusCode.UNSET if span.error is None else trace.StatusCode.ERROR
            readable = ReadableSpan(
                name=span.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                kind=_KINDS[span.kind],
                status=trace.Status(code, span.error),
                start_time=int(span.started_at * _NANOSECONDS),
                end_time=int(span.ended_at * _NANOSECONDS),
            )
            self._batches.on_end(readable)

    def close(self) -> None:
        """Send the queued spans; give up after `CLOSE_S` seconds if the collector does not answer."""
        timer = threading.Timer(CLOSE_S, self._sender.shutdown)
        timer.start()
        self._batches.shutdown()  # type: ignore[no-untyped-call]
        timer.cancel()


def _span_context(context: trace_context.TraceContext, span_id: str) -> trace.SpanContext:
    state = trace.TraceState.from_header([context.state]) if context.state else None
    return trace.SpanContext(int(context.trace_id, 16), int(span_id, 16), False, _SAMPLED, state)
