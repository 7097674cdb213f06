"""The logging context and the trace spans of a worker's requests.

Both wrap the handler of the endpoint, so that `inflight` does not know them. The spans are `handle_payload` and, within
it, `prefill` (until the first token is sent, including the time in the engine's queue) and `decode`. A call that is not
sampled reaches the handler unchanged; a sampled one costs more for its first token only.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.observability import logs, tracing
from dynamo.protocols import generate, trace_context
from dynamo.runtime import requests

_SPAN = "handle_payload"


def logged(handler: requests.Handler) -> requests.Handler:
    """Wrap a handler so that log lines written while it handles a call name the request."""

    def handle(call: requests.Call) -> None:
        headers = call.headers
        context = logs.LogContext(_SPAN, headers.get("x-request-id"), trace_context.read(headers))
        token = logs.log_context.set(context)
        try:
            handler(call)
        finally:
            logs.log_context.reset(token)

    return handle


def traced(
    handler: requests.Handler, exporter: tracing.SpanExporter, ratio: float, clock: clocks.Clock
) -> requests.Handler:
    """Wrap a handler so that the spans of sampled calls go to the exporter; `ratio` of new traces are sampled."""

    def handle(call: requests.Call) -> None:
        trace, parent_id = tracing.start_span(call.headers, ratio=ratio)
        if trace is None or not trace.is_sampled:
            handler(call)
            return

        def export(accepted_at: float, first_at: float | None, error: str | None) -> None:
            now = clock.now()
            wall = tracing.wall_clock(now, clock.wall())
            request_id = call.headers.get("x-request-id")
            root = tracing.Span(
                name=_SPAN,
                context=trace,
                parent_id=parent_id,
                started_at=wall(accepted_at),
                ended_at=wall(now),
                kind="server",
                attributes={} if request_id is None else {"x_request_id": request_id},
                error=error,
            )
            stages = (("prefill", accepted_at, first_at), ("decode", first_at, now))
            exporter.export([root, *tracing.stage_spans(trace, stages, wall)])

        handler(TimedCall(call, clock.now, export))

    return handle


class TimedCall:
    """A call that records when its first output is sent, and calls `on_end` at its end.

    `on_end` gets the time of this call, the time of the first output or None, and the code of an error or None.
    """

    def __init__(
        self,
        call: requests.Call,
        now: Callable[[], float],
        on_end: Callable[[float, float | None, str | None], None],
    ) -> None:
        self._call = call
        self._now = now
        self._on_end = on_end
        self._accepted_at = now()
        self._first_at: float | None = None
        # Rebound at the first output (hot path): a later token goes to the call without a method of ours between.
        self.send: Callable[[generate.Output], None] = self._send_first

    @property
    def endpoint(self) -> str:
        return self._call.endpoint

    @property
    def body(self) -> msgspec.Raw:
        return self._call.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self._call.headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        def cancelled() -> None:
            callback()
            self._end("cancelled")

        self._call.on_cancel(cancelled)

    def on_signal(self, callback: Callable[[int], None]) -> None:
        self._call.on_signal(callback)

    def reply(self, value: Any) -> None:
        self._call.reply(value)

    def finish(self) -> None:
        self._call.finish()
        self._end(None)

    def fail(self, error: errors.DynamoError) -> None:
        self._call.fail(error)
        self._end(error.code)

    def _send_first(self, output: generate.Output) -> None:
        self._first_at = self._now()
        self.send = self._call.send
        self.send(output)

    def _end(self, error: str | None) -> None:
        self._on_end(self._accepted_at, self._first_at, error)
