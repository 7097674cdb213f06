"""Everything that tells of single requests, as the operator wants it: spans, request trace, audit log, lines of log.

What is not wanted does not exist: no observer, no thread, and the exchange is answered itself.
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dynamo.base import clock
from dynamo.frontend import audit, config, metrics
from dynamo.observability import logs, row_writer, tracing
from dynamo.observability import metrics as observed
from dynamo.protocols import blocks, trace_context


class _Closing(Protocol):
    def close(self) -> None: ...


class RequestRecords:
    """Made once for a frontend; closed with it. Raises ConfigError."""

    def __init__(
        self, settings: config.FrontendConfig, registry: observed.Registry, time: clock.Clock
    ) -> None:
        self._dropped = registry.counter(
            "records_dropped_total", "Rows that were not written", ("records",)
        )
        self._open: list[_Closing] = []
        self._observers: list[metrics.RequestObserver] = []
        self.enter_trace: tracing.StartSpan = tracing.forward_trace
        self.watch: audit.WatchExchange | None = None
        if is_log_enabled():
            self._observers.append(RequestLog())
        self._open_spans(settings, time)
        self._open_request_trace(settings.request_trace_options, time)
        self._open_audit(settings.audit_options, is_forced=settings.audit_force_logging)

    @property
    def observers(self) -> Sequence[metrics.RequestObserver]:
        """Who wants to know of each request that has ended."""
        return self._observers

    async def close(self) -> None:
        """Write and send what waits."""
        for one in self._open:
            await asyncio.to_thread(one.close)

    def _open_spans(self, settings: config.FrontendConfig, time: clock.Clock) -> None:
        exporter = tracing.make_exporter(settings)
        if exporter is None:
            return
        told = RequestSpans(exporter, settings.otel_traces_sampler_arg, time)
        self._observers.append(told)
        self._open.append(told)
        self.enter_trace = told.enter

    def _open_request_trace(self, options: row_writer.RowOptions, time: clock.Clock) -> None:
        if not options.sinks:
            return
        dropped = self._dropped.labels("request_trace")
        writer = row_writer.RowWriter(options, encode_trace_row, dropped)
        trace = RequestTrace(writer, time)
        self._observers.append(trace)
        self._open.append(trace)

    def _open_audit(self, options: row_writer.RowOptions, *, is_forced: bool) -> None:
        if not options.sinks:
            return
        writer = row_writer.RowWriter(options, audit.encode_row, self._dropped.labels("audit"))
        kept = audit.AuditLog(writer, is_forced=is_forced)
        self._open.append(kept)
        self.watch = kept.watch


_logger = logging.getLogger(
    "dynamo.frontend.records.request_log"
)  # documented: users set its level


class RequestLog:
    """Observes requests."""

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        arrival = request.arrival
        token = logs.log_context.set(
            logs.LogContext("http-request", arrival.told_id, arrival.trace)
        )
        _logger.debug(
            "%s of %s: %s, %d tokens in %.3f s",
            request.endpoint,
            request.model.label,
            request.error_type or "success",
            request.num_tokens,
            (request.ended_at or arrival.at) - arrival.at,
        )
        logs.log_context.reset(token)


def is_log_enabled() -> bool:
    """Asked once, at start."""
    return _logger.isEnabledFor(logging.DEBUG)


class RequestSpans:
    """Observes requests, and exports the spans of those that are sampled."""

    def __init__(self, exporter: tracing.SpanExporter, ratio: float, time: clock.Clock) -> None:
        self._exporter = exporter
        self._clock = time
        self.enter: tracing.StartSpan = functools.partial(tracing.start_span, ratio=ratio)

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        trace = request.arrival.trace
        if trace is not None and trace.is_sampled:
            wall = tracing.wall_clock(self._clock.now(), self._clock.wall())
            self._exporter.export(_spans(request, trace, wall))

    def close(self) -> None:
        """Send what waits. Blocks."""
        self._exporter.close()


def _spans(
    request: metrics.RequestMeter, trace: trace_context.TraceContext, wall: tracing.WallClock
) -> list[tracing.Span]:
    root = tracing.Span(
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
    return [root, *tracing.stage_spans(trace, stages, wall)]


def _attributes(request: metrics.RequestMeter) -> dict[str, tracing.AttributeValue]:
    return {
        "x_request_id": request.arrival.told_id,
        "endpoint": request.endpoint,
        "model": request.model.label,
        "request_type": request.request_type,
        "input_tokens": request.request.prompt_len if request.request is not None else 0,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_tokens,
    }


SCHEMA = "dynamo.request.trace.v1"
_MILLISECONDS = 1000.0


class TraceRow(msgspec.Struct, frozen=True):
    """What the writer's thread makes a row of."""

    request: metrics.RequestMeter
    ended_ms: int  # since 1970


class RequestTrace:
    """Observes requests."""

    def __init__(self, writer: row_writer.RowWriter[TraceRow], time: clock.Clock) -> None:
        self._writer = writer
        self._clock = time

    def ended(self, request: metrics.RequestMeter) -> None:
        """It is over."""
        asked = request.request
        if asked is None or request.num_prompts > 1 or asked.sampling_options.n > 1:
            return
        row = TraceRow(request, int(self._clock.wall() * _MILLISECONDS))
        self._writer.put(row, len(asked.token_ids))

    def close(self) -> None:
        """Write what waits. Blocks."""
        self._writer.close()


def encode_trace_row(row: TraceRow) -> bytes:
    """One line."""
    request = row.request
    total_ms = _since(request.arrived_at, request.ended_at) or 0.0
    told = {
        "request_id": request.arrival.told_id,
        "model": request.model.label,
        "request_received_ms": row.ended_ms - round(total_ms),
        "input_tokens": request.request.prompt_len if request.request else 0,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_tokens,
        "ttft_ms": _since(request.arrived_at, request.first_token_at),
        "total_time_ms": total_ms,
        "error_type": request.error_type or None,
        "replay": _replay(request),
    }
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": row.ended_ms,
            "request": told,
        }
    )


def _replay(request: metrics.RequestMeter) -> dict[str, Any] | None:
    size = request.model.block_size
    if request.request is None or not size:
        return None
    seed = blocks.seed_of(request.request.lora_name)
    local = blocks.local_hashes(request.request.token_ids, size, seed)
    return {
        "trace_block_size": size,
        "input_length": request.request.prompt_len,
        "input_sequence_hashes": blocks.sequence_hashes(local),
    }


def _since(begin: float, end: float | None) -> float | None:
    return None if end is None else round((end - begin) * _MILLISECONDS, 3)
