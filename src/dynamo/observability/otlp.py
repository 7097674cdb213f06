"""Spans to an OpenTelemetry collector, as OTLP over HTTP; the only door to opentelemetry.

The SDK batches, sends and tries again, in a thread of its own. It gets spans that are over (`ReadableSpan`): to begin
and end each of them in its tracer would cost the event loop six times as much (docs/decisions/0009-spans-when-over.md).
"""

import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from dynamo.observability import spans
from dynamo.protocols import trace_context

_KINDS = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_NANOSECONDS = 1e9
CLOSE_S = 1.0


class OtlpExporter:
    """Sends to one collector. At most 2048 spans wait; more are dropped."""

    def __init__(self, endpoint: str, service: str) -> None:
        self._resource = Resource.create({"service.name": service})
        self._sender = OTLPSpanExporter(endpoint=endpoint)
        self._batches = BatchSpanProcessor(self._sender)

    def export(self, found: Sequence[spans.Span]) -> None:
        """Take these."""
        for span in found:
            self._batches.on_end(self._readable(span))

    def close(self) -> None:
        """Send what waits; a collector that does not answer is not tried again for long."""
        patience = threading.Timer(CLOSE_S, self._sender.shutdown)
        patience.start()
        self._batches.shutdown()  # type: ignore[no-untyped-call]
        patience.cancel()

    def _readable(self, span: spans.Span) -> ReadableSpan:
        context = _context(span.context, span.context.span_id)
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=_context(span.context, span.parent_id) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            status=_status(span.error),
            start_time=int(span.started_at * _NANOSECONDS),
            end_time=int(span.ended_at * _NANOSECONDS),
        )


def _context(context: trace_context.TraceContext, span_id: str) -> trace.SpanContext:
    state = trace.TraceState.from_header([context.state]) if context.state else None
    return trace.SpanContext(int(context.trace_id, 16), int(span_id, 16), False, _SAMPLED, state)


def _status(error: str | None) -> trace.Status:
    if error is None:
        return trace.Status(trace.StatusCode.UNSET)
    return trace.Status(trace.StatusCode.ERROR, error)
