"""The audit log: requests and responses word by word, of the requests that allow it.

These are the requests with `store: true`, or all if the operator forces it. Headers are not written, so no key is. A
response is copied on its way to the client: as it is, or if it is a stream, the data of its events in order.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.observability import row_writer
from dynamo.runtime.http import exchange

WatchExchange = Callable[[exchange.Exchange], exchange.Exchange]
MAX_RESPONSE_BYTES = 16 * 2**20
_EVENT_END = b"\n\n"
_DATA = b"data: "
_END_OF_STREAM = b"[DONE]"


class _RequestFields(msgspec.Struct, frozen=True):
    """The fields of any request that the audit log reads."""

    model: Any = None
    store: Any = None
    stream: Any = None


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


class AuditLog:
    """Records the exchanges of requests that allow it."""

    def __init__(self, writer: row_writer.RowWriter[AuditRow], *, is_forced: bool) -> None:
        self._writer = writer
        self._is_forced = is_forced

    def watch(self, caller: exchange.Exchange) -> exchange.Exchange:
        """Return the exchange to answer instead of this one: one that records it, or the same."""
        try:
            fields = _decode_fields(caller.request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return caller  # it is refused, and does not say that it may be recorded
        if fields.store is not True and not self._is_forced:
            return caller
        return AuditedExchange(caller, fields, self._put)

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
        "_request_id",
        "_status",
    )

    def __init__(
        self,
        inner: exchange.Exchange,
        fields: _RequestFields,
        on_end: Callable[[AuditRow], None],
    ) -> None:
        super().__init__(inner)
        self._fields = fields
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
            )
        )


def encode_row(row: AuditRow) -> bytes:
    """Encode a row as one line of JSON; an incomplete response is left out, unless it is a stream."""
    response: list[msgspec.Raw] | msgspec.Raw | None = None
    if row.is_stream:
        response = _format_events(row.response)
    elif row.is_complete and row.response:
        response = _compact(row.response)
    return msgspec.json.encode(
        {
            "schema_version": 1,
            "request_id": row.request_id,
            "requested_streaming": row.fields.stream is True,
            "model": row.fields.model,
            "path": row.request.path,
            "status": row.status,
            "is_complete": row.is_complete,
            "request": _compact(row.request.body),
            "response": response,
        }
    )


def _format_events(stream: bytes) -> list[msgspec.Raw]:
    lines = (line for event in stream.split(_EVENT_END) for line in event.split(b"\n"))
    events = (line.removeprefix(_DATA) for line in lines if line.startswith(_DATA))
    return [_compact(data) for data in events if data != _END_OF_STREAM]


def _compact(text: bytes) -> msgspec.Raw:
    """Return the same JSON on one line."""
    return msgspec.Raw(msgspec.json.format(text, indent=-1))
