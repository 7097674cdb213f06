"""Everything that tells of single requests, as the operator wants it: spans, request trace, audit log, lines of log.

What is not wanted does not exist: no observer, no thread, and the exchange is answered itself.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from dynamo.base import clock
from dynamo.frontend import config, metrics
from dynamo.frontend.records import audit, request_log, request_spans, request_trace
from dynamo.observability import metrics as observed
from dynamo.observability import row_writer, spans, tracing


class _Closing(Protocol):
    def close(self) -> None: ...


class Records:
    """Made once for a frontend; closed with it. Raises ConfigError."""

    def __init__(
        self, settings: config.FrontendConfig, registry: observed.Registry, time: clock.Clock
    ) -> None:
        self._dropped = registry.counter(
            "records_dropped_total", "Rows that were not written", ("records",)
        )
        self._open: list[_Closing] = []
        self._observers: list[metrics.Observer] = []
        self.enter_trace: spans.Enter = spans.pass_on
        self.watch: audit.Watch | None = None
        if request_log.is_wanted():
            self._observers.append(request_log.RequestLog())
        self._open_spans(settings, time)
        self._open_request_trace(settings.request_trace_options, time)
        self._open_audit(settings.audit_options, is_forced=settings.audit_force_logging)

    @property
    def observers(self) -> Sequence[metrics.Observer]:
        """Who wants to know of each request that has ended."""
        return self._observers

    async def close(self) -> None:
        """Write and send what waits."""
        for one in self._open:
            await asyncio.to_thread(one.close)

    def _open_spans(self, settings: config.FrontendConfig, time: clock.Clock) -> None:
        exporter = tracing.exporter(settings)
        if exporter is None:
            return
        told = request_spans.RequestSpans(exporter, settings.otel_traces_sampler_arg, time)
        self._observers.append(told)
        self._open.append(told)
        self.enter_trace = told.enter

    def _open_request_trace(self, options: row_writer.Options, time: clock.Clock) -> None:
        if not options.sinks:
            return
        dropped = self._dropped.labels("request_trace")
        writer = row_writer.RowWriter(options, request_trace.encode, dropped)
        trace = request_trace.RequestTrace(writer, time)
        self._observers.append(trace)
        self._open.append(trace)

    def _open_audit(self, options: row_writer.Options, *, is_forced: bool) -> None:
        if not options.sinks:
            return
        writer = row_writer.RowWriter(options, audit.encode, self._dropped.labels("audit"))
        kept = audit.Audit(writer, is_forced=is_forced)
        self._open.append(kept)
        self.watch = kept.watch
