"""The records of single requests: spans, the request trace, the audit log and lines of the log.

Records that the settings do not ask for do not exist: no observer, no thread, and no exchange around the client's.

The spans of a request in the frontend are `http-request`, and one for each stage that it reached:

preprocess            from its arrival until its tokens are known
prefill_routing       until the workers have its prompts
transport_roundtrip   until the first token came back
stream                until the end

The request trace has a row for each request that has ended, with all that is needed to replay the same load. A row
(schema `dynamo.request.trace.v1`) has no text: the prompt is described by the hashes of its blocks
(`protocols.blocks`), which show shared prefixes and from which Mooncake's format can be made. Requests with several
prompts or choices are left out, because a replay could not send them.

The audit log has requests and responses word by word, of the requests with `store: true`, or of all if the operator
forces it, with the name of the API key. Headers are not written, so no key is. A response is copied on its way to the
client: as it is, or if it is a stream, the data of its events in order.

A line of the log for each request is written at `debug`: DYN_LOG=info,dynamo.frontend.request_records=debug.
"""

import asyncio
import codecs
import datetime
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.frontend import config, metrics
from dynamo.observability import logs, row_writer, tracing
from dynamo.observability import metrics as observed
from dynamo.protocols import blocks, generate, trace_context
from dynamo.runtime.http import exchange

WatchExchange = Callable[[exchange.Exchange], exchange.Exchange]
FindKeyName = Callable[[exchange.Exchange], str | None]
MAX_RESPONSE_BYTES = 16 * 2**20
_DATA = b"data: "
_END_OF_STREAM = b"[DONE]"
_NULL, _TRUE = msgspec.Raw(b"null"), msgspec.Raw(b"true")


class _RequestFields(msgspec.Struct, frozen=True):
    """The fields of any request that the audit log reads, as they came: a client may send anything there."""

    model: msgspec.Raw = _NULL
    store: msgspec.Raw = _NULL
    stream: msgspec.Raw = _NULL


_decode_fields = msgspec.json.Decoder(_RequestFields).decode


class AuditRow(msgspec.Struct, frozen=True):
    """One request and its response, as bytes, of which the writer's thread makes a line."""

    fields: _RequestFields
    request: exchange.Request
    request_id: str | None
    status: int | None
    response: bytes
    is_stream: bool
    is_complete: bool
    arrived_at: float  # seconds since 1970
    key_name: str | None  # of the API key, where there are keys


class AuditLog:
    """Records the exchanges of requests that allow it."""

    def __init__(
        self, writer: row_writer.RowWriter[AuditRow], clock: clocks.Clock, *, is_forced: bool
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._is_forced = is_forced

    def watch(self, find_key_name: FindKeyName, caller: exchange.Exchange) -> exchange.Exchange:
        """Return the exchange to answer instead of this one: one that records it, or the same."""
        try:
            fields = _decode_fields(caller.request.body.removeprefix(codecs.BOM_UTF8))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = _RequestFields()  # it is refused, or has raw tensors behind its JSON
        if fields.store != _TRUE and not self._is_forced:
            return caller
        origin = self._clock.wall(), find_key_name(caller)
        return AuditedExchange(caller, fields, origin, self._put)

    def close(self) -> None:
        """Write the rows that wait. Blocks."""
        self._writer.close()

    def _put(self, row: AuditRow) -> None:
        self._writer.put(row, len(row.request.body) + len(row.response))


class AuditedExchange(exchange.WrappedExchange):
    """Passes everything on to another exchange, and calls `on_end` with a row of it once it has ended."""

    __slots__ = (
        "_chunks",
        "_fields",
        "_has_ended",
        "_is_cut",
        "_num_bytes",
        "_on_end",
        "_origin",
        "_request_id",
        "_status",
    )

    def __init__(
        self,
        inner: exchange.Exchange,
        fields: _RequestFields,
        origin: tuple[float, str | None],
        on_end: Callable[[AuditRow], None],
    ) -> None:
        super().__init__(inner)
        self._fields, self._origin = fields, origin
        self._on_end = on_end
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._is_cut = self._has_ended = False
        self._status: int | None = None
        self._request_id: str | None = None
        inner.on_disconnect(lambda: self._end(is_complete=False))

    def _drop_body(self) -> None:
        """Do nothing: the row has the body."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        def lost() -> None:
            self._end(is_complete=False)
            callback()

        self._inner.on_disconnect(lost)

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: exchange.Headers = (),
    ) -> None:
        headers = tuple(headers)
        self._record_head(status, headers)
        self._record(body)
        self._inner.respond(status, body, content_type=content_type, headers=headers)
        self._end(is_complete=True)

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        headers = tuple(headers)
        self._record_head(status, headers)
        self._inner.start_stream(status, content_type=content_type, headers=headers)

    def write(self, chunk: bytes) -> None:
        self._record(chunk)
        self._inner.write(chunk)

    def end(self, chunk: bytes = b"") -> None:
        self._record(chunk)
        self._inner.end(chunk)
        self._end(is_complete=True)

    def _record_head(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        self._status = status
        self._request_id = dict(headers).get("x-request-id")

    def _record(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if self._num_bytes > MAX_RESPONSE_BYTES:
            self._is_cut = True
        else:
            self._chunks.append(chunk)

    def _end(self, *, is_complete: bool) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._on_end(
            AuditRow(
                self._fields,
                self.request,
                self._request_id,
                self._status,
                b"".join(self._chunks),
                self._inner.is_streaming,
                is_complete and not self._is_cut,
                *self._origin,
            )
        )


def encode_row(row: AuditRow) -> bytes:
    """Encode a row as one line of JSON; an incomplete response is left out, unless it is a stream."""
    response: list[msgspec.Raw] | msgspec.Raw | None = None
    if row.is_stream:
        response = _format_events(row.response)
    elif row.is_complete and row.response:
        response = _compact(row.response)
    try:
        request: msgspec.Raw | str = _compact(row.request.body)
    except (msgspec.DecodeError, RecursionError):
        request = row.request.body.decode(errors="replace")
    return msgspec.json.encode(
        {
            "schema_version": 1,
            "time": datetime.datetime.fromtimestamp(row.arrived_at, datetime.UTC),
            "request_id": row.request_id,
            "key": row.key_name,
            "requested_streaming": row.fields.stream == _TRUE,
            "model": _compact(bytes(row.fields.model)),
            "path": row.request.path,
            "status": row.status,
            "is_complete": row.is_complete,
            "request": request,
            "response": response,
        }
    )


def _format_events(stream: bytes) -> list[msgspec.Raw]:
    lines = stream.split(b"\n")
    data_starts = (_DATA, b"{")  # of Ollama's streams each line is an object
    events = (line.removeprefix(_DATA) for line in lines if line.startswith(data_starts))
    return [_compact(data) for data in events if data != _END_OF_STREAM]


def _compact(text: bytes) -> msgspec.Raw:
    """Return the same JSON on one line, with U+FFFD for what is no UTF-8, such as in the body of a refused request.

    Raises DecodeError for what is no JSON.
    """
    return msgspec.Raw(msgspec.json.format(text.decode("utf-8-sig", errors="replace"), indent=-1))


SCHEMA = "dynamo.request.trace.v1"
_MILLISECONDS = 1000.0
# users set the level of this documented name
_logger = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


class RequestRecords:
    """All records of one frontend. Raises ConfigError for a sink that cannot be opened."""

    def __init__(
        self, settings: config.FrontendConfig, registry: observed.Registry, clock: clocks.Clock
    ) -> None:
        dropped = registry.counter(
            "records_dropped_total", "Rows that were not written", ("records",)
        )
        self._open_records: list[_Closable] = []
        self._observers: list[metrics.RequestObserver] = []
        self.enter_trace: tracing.StartSpan = tracing.forward_trace
        self._audit_log: AuditLog | None = None
        if is_log_enabled():
            self._observers.append(RequestLog())
        exporter = tracing.make_exporter(settings)
        if exporter is not None:
            request_spans = RequestSpans(exporter, settings.otel_traces_sampler_arg, clock)
            self._observers.append(request_spans)
            self._open_records.append(request_spans)
            self.enter_trace = request_spans.enter
        if settings.request_trace_options.sinks:
            trace_writer = row_writer.RowWriter(
                settings.request_trace_options, encode_trace_row, dropped.labels("request_trace")
            )
            trace = RequestTrace(trace_writer, clock)
            self._observers.append(trace)
            self._open_records.append(trace)
        if settings.audit_options.sinks:
            audit_writer = row_writer.RowWriter(
                settings.audit_options, encode_row, dropped.labels("audit")
            )
            self._audit_log = AuditLog(audit_writer, clock, is_forced=settings.audit_force_logging)
            self._open_records.append(self._audit_log)

    @property
    def observers(self) -> Sequence[metrics.RequestObserver]:
        return self._observers

    def make_watch(self, find_key_name: FindKeyName) -> WatchExchange:
        """Return what has exchanges recorded in the audit log; without one it changes nothing."""
        if self._audit_log is None:
            return lambda client: client
        return functools.partial(self._audit_log.watch, find_key_name)

    async def close(self) -> None:
        """Write and send all rows and spans that wait."""
        for records in self._open_records:
            await asyncio.to_thread(records.close)


class RequestLog:
    """Writes a line of the log for each request that has ended."""

    def ended(self, request: metrics.RequestMeter) -> None:
        """Write the line of a request."""
        arrival = request.arrival
        token = logs.log_context.set(
            logs.LogContext("http-request", arrival.reported_id, arrival.trace)
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
    """Return whether requests are logged; read once, at the start."""
    return _logger.isEnabledFor(logging.DEBUG)


class RequestSpans:
    """Exports the spans of the sampled requests."""

    def __init__(self, exporter: tracing.SpanExporter, ratio: float, clock: clocks.Clock) -> None:
        self._exporter = exporter
        self._clock = clock
        self.enter: tracing.StartSpan = functools.partial(tracing.start_span, ratio=ratio)

    def ended(self, request: metrics.RequestMeter) -> None:
        """Export the spans of the request, if it is sampled."""
        trace = request.arrival.trace
        if trace is not None and trace.is_sampled:
            wall = tracing.wall_clock(self._clock.now(), self._clock.wall())
            self._exporter.export(_make_spans(request, trace, wall))

    def close(self) -> None:
        """Send the spans that wait. Blocks."""
        self._exporter.close()


def _make_spans(
    request: metrics.RequestMeter, trace: trace_context.TraceContext, wall: tracing.WallClock
) -> list[tracing.Span]:
    attributes: dict[str, tracing.AttributeValue] = {
        "x_request_id": request.arrival.reported_id,
        "endpoint": request.endpoint,
        "model": request.model.label,
        "request_type": request.request_type,
        "input_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_tokens,
        "num_migrations": request.num_migrations,
    }
    if request.worker_id is not None:
        attributes["worker_id"] = f"{request.worker_id:x}"
    if request.prefill is not None:
        attributes["prefill_worker_id"] = f"{request.prefill.instance_id:x}"
    root = tracing.Span(
        name="http-request",
        context=trace,
        parent_id=request.arrival.parent_id,
        started_at=wall(request.arrived_at),
        ended_at=wall(request.ended_at or request.arrived_at),
        kind="server",
        attributes=attributes,
        error=request.error_type or None,
    )
    prepared_at, first_at = request.prepared_at, request.first_token_at
    stages = (
        tracing.Stage("preprocess", request.arrived_at, prepared_at),
        tracing.Stage("prefill_routing", prepared_at, request.opened_at),
        tracing.Stage("transport_roundtrip", prepared_at, first_at),
        tracing.Stage("stream", first_at, request.ended_at),
    )
    return [root, *tracing.stage_spans(trace, stages, wall)]


class TraceRow(msgspec.Struct, frozen=True):
    """A request that has ended, of which the writer's thread makes a row."""

    request: metrics.RequestMeter
    prompt: generate.Request
    ended_ms: int  # since 1970


class RequestTrace:
    """Writes a row for each request that has ended."""

    def __init__(self, writer: row_writer.RowWriter[TraceRow], clock: clocks.Clock) -> None:
        self._writer = writer
        self._clock = clock

    def ended(self, request: metrics.RequestMeter) -> None:
        """Pass the request to the writer's thread, unless a replay could not send it."""
        first_prompt = request.request
        if first_prompt is None or request.num_prompts > 1 or first_prompt.sampling_options.n > 1:
            return
        row = TraceRow(request, first_prompt, int(self._clock.wall() * _MILLISECONDS))
        self._writer.put(row, len(first_prompt.token_ids))

    def close(self) -> None:
        """Write the rows that wait. Blocks."""
        self._writer.close()


def encode_trace_row(row: TraceRow) -> bytes:
    """Encode a row as one line of JSON."""
    request = row.request
    total_ms = _elapsed_ms(request.arrived_at, request.ended_at) or 0.0
    fields = {
        "request_id": request.arrival.reported_id,
        "model": request.model.label,
        "request_received_ms": row.ended_ms - round(total_ms),
        "input_tokens": row.prompt.prompt_len,
        "cached_tokens": request.num_cached,
        "cached_tokens_by_tier": request.tier_tokens,
        "output_tokens": request.num_tokens,
        "ttft_ms": _elapsed_ms(request.arrived_at, request.first_token_at),
        "total_time_ms": total_ms,
        "error_type": request.error_type or None,
        "replay": _replay_fields(row.prompt, request.model.block_size),
    }
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": row.ended_ms,
            "request": fields,
        }
    )


def _replay_fields(prompt: generate.Request, block_size: int) -> dict[str, Any] | None:
    if not block_size:
        return None
    local = blocks.local_hashes(prompt.hashed_ids, block_size, prompt.hash_seed)
    return {
        "trace_block_size": block_size,
        "input_length": prompt.prompt_len,
        "input_sequence_hashes": blocks.sequence_hashes(local),
    }


def _elapsed_ms(begin: float, end: float | None) -> float | None:
    return None if end is None else round((end - begin) * _MILLISECONDS, 3)
