"""The spans of a request in the frontend: `http-request`, and one for each stage that it reached.

preprocess            from its arrival until its tokens are known
prefill_routing       until the workers have its prompts
transport_roundtrip   until the first token came back
stream                until the end
"""

import functools

from dynamo.base import clock
from dynamo.frontend import metrics
from dynamo.observability import spans
from dynamo.protocols import trace_context


class RequestSpans:
    """Observes requests, and exports the spans of those that are sampled."""

    def __init__(self, exporter: spans.Exporter, ratio: float, time: clock.Clock) -> None:
        self._exporter = exporter
        self._clock = time
        self.enter: spans.Enter = functools.partial(spans.enter, ratio=ratio)

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        trace = request.arrival.trace
        if trace is not None and trace.is_sampled:
            wall = spans.wall_of(self._clock.now(), self._clock.wall())
            self._exporter.export(_spans(request, trace, wall))

    def close(self) -> None:
        """Send what waits. Blocks."""
        self._exporter.close()


def _spans(
    request: metrics.RequestMeter, trace: trace_context.TraceContext, wall: spans.Wall
) -> list[spans.Span]:
    root = spans.Span(
        name="http-request",
        context=trace,
        parent_id=request.arrival.parent_id,
        started_at=wall(request.arrived_at),
        ended_at=wall(request.ended_at or request.arrived_at),
        kind="server",
        attributes=_attributes(request),
        error=request.error_type or None,
    )
    prepared_at, first_at = request.prepared_at, request.first_token_at
    stages = (
        ("preprocess", request.arrived_at, prepared_at),
        ("prefill_routing", prepared_at, request.opened_at),
        ("transport_roundtrip", prepared_at, first_at),
        ("stream", first_at, request.ended_at),
    )
    return [root, *spans.children(trace, stages, wall)]


def _attributes(request: metrics.RequestMeter) -> dict[str, spans.Value]:
    return {
        "x_request_id": request.arrival.told_id,
        "endpoint": request.endpoint,
        "model": request.model.label,
        "request_type": request.request_type,
        "input_tokens": request.request.prompt_len if request.request is not None else 0,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_tokens,
    }
