"""Which request a worker works on, told to its logs and, where that is switched on, to a collector of traces.

Both stand around the handler of the endpoint, so the requests in flight know nothing of them. The spans are
`handle_payload` and, in it, `prefill` (until the first token went out, so it has the time in the engine's queue) and
`decode`. A call that is not sampled goes through as it is; one that is pays once, with its first token.
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
    """The handler; what is logged while it takes a call names the request."""

    def take(call: requests.Call) -> None:
        headers = call.headers
        subject = logs.LogContext(_SPAN, headers.get("x-request-id"), trace_context.read(headers))
        token = logs.log_context.set(subject)
        try:
            handler(call)
        finally:
            logs.log_context.reset(token)

    return take


def traced(
    handler: requests.Handler, exporter: tracing.SpanExporter, ratio: float, clock: clocks.Clock
) -> requests.Handler:
    """The handler; its calls are told to the exporter."""

    def take(call: requests.Call) -> None:
        trace, parent_id = tracing.start_span(call.headers, ratio=ratio)
        if trace is None or not trace.is_sampled:
            handler(call)
            return

        def ended(taken_at: float, first_at: float | None, error: str | None) -> None:
            now = clock.now()
            wall = tracing.wall_clock(now, clock.wall())
            root = tracing.Span(
                name=_SPAN,
                context=trace,
                parent_id=parent_id,
                started_at=wall(taken_at),
                ended_at=wall(now),
                kind="server",
                attributes=_attributes(call.headers),
                error=error,
            )
            stages = (("prefill", taken_at, first_at), ("decode", first_at, now))
            exporter.export([root, *tracing.stage_spans(trace, stages, wall)])

        handler(TimedCall(call, clock.now, ended))

    return take


def _attributes(headers: Mapping[str, str]) -> dict[str, tracing.AttributeValue]:
    request_id = headers.get("x-request-id")
    return {} if request_id is None else {"x_request_id": request_id}


class TimedCall:
    """A call that notes when its first output went out, and tells its end."""

    def __init__(
        self,
        call: requests.Call,
        now: Callable[[], float],
        ended: Callable[[float, float | None, str | None], None],
    ) -> None:
        self._call = call
        self._now = now
        self._ended = ended
        self._taken_at = now()
        self._first_at: float | None = None
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

    def on_choice_cancel(self, callback: Callable[[int], None]) -> None:
        self._call.on_choice_cancel(callback)

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
        self.send = self._call.send  # from here on nothing stands between
        self.send(output)

    def _end(self, error: str | None) -> None:
        self._ended(self._taken_at, self._first_at, error)
