"""The audit log: what was asked and what was answered, word by word, for those requests that allow it.

That is those with `store: true`, or all where the operator forces it. Headers are not written, so no key is. An answer
is caught on its way to the client: as it is if it is whole; the data of its events, in order, if it is a stream.
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
_DONE = b"[DONE]"


class _Asked(msgspec.Struct, frozen=True):
    """What we must know of any request."""

    model: Any = None
    store: Any = None
    stream: Any = None


_read = msgspec.json.Decoder(_Asked).decode


class AuditRow(msgspec.Struct, frozen=True):
    """One request and its answer, as bytes; the writer's thread makes a line of them."""

    asked: _Asked
    request: exchange.Request
    request_id: str | None
    status: int | None
    answer: bytes
    is_stream: bool
    is_complete: bool


class AuditLog:
    """Watches exchanges."""

    def __init__(self, writer: row_writer.RowWriter[AuditRow], *, is_forced: bool) -> None:
        self._writer = writer
        self._is_forced = is_forced

    def watch(self, caller: exchange.Exchange) -> exchange.Exchange:
        """The exchange to answer instead of this one."""
        try:
            asked = _read(caller.request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return caller  # no request at all: it is refused, and nobody allowed us to keep it
        if asked.store is not True and not self._is_forced:
            return caller
        return AuditedExchange(caller, asked, self._keep)

    def close(self) -> None:
        """Write what waits. Blocks."""
        self._writer.close()

    def _keep(self, row: AuditRow) -> None:
        self._writer.put(row, len(row.request.body) + len(row.answer))


class AuditedExchange(exchange.Exchange):
    """Passes everything on to another exchange, and tells at the end what passed."""

    __slots__ = (
        "_answer",
        "_asked",
        "_inner",
        "_is_cut",
        "_is_told",
        "_num_bytes",
        "_request_id",
        "_status",
        "_tell",
    )

    def __init__(
        self, inner: exchange.Exchange, asked: _Asked, tell: Callable[[AuditRow], None]
    ) -> None:
        self.request = inner.request
        self._inner = inner
        self._asked = asked
        self._tell = tell
        self._answer: list[bytes] = []
        self._num_bytes = 0
        self._is_cut = self._is_told = False
        self._status: int | None = None
        self._request_id: str | None = None
        inner.on_disconnect(lambda: self._end(is_complete=False))

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    @property
    def is_streaming(self) -> bool:
        return self._inner.is_streaming

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
        self._note_head(status, headers)
        self._note(body)
        self._inner.respond(status, body, content_type=content_type, headers=headers)
        self._end(is_complete=True)

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        headers = tuple(headers)
        self._note_head(status, headers)
        self._inner.start_stream(status, content_type=content_type, headers=headers)

    def write(self, chunk: bytes) -> None:
        self._note(chunk)
        self._inner.write(chunk)

    def end(self, chunk: bytes = b"") -> None:
        self._note(chunk)
        self._inner.end(chunk)
        self._end(is_complete=True)

    def _note_head(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        self._status = status
        self._request_id = dict(headers).get("x-request-id")

    def _note(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if self._num_bytes > MAX_RESPONSE_BYTES:
            self._is_cut = True
        else:
            self._answer.append(chunk)

    def _end(self, *, is_complete: bool) -> None:
        if self._is_told:
            return
        self._is_told = True
        self._tell(
            AuditRow(
                self._asked,
                self.request,
                self._request_id,
                self._status,
                b"".join(self._answer),
                self._inner.is_streaming,
                is_complete and not self._is_cut,
            )
        )


def encode_row(row: AuditRow) -> bytes:
    """One line."""
    return msgspec.json.encode(
        {
            "schema_version": 1,
            "request_id": row.request_id,
            "requested_streaming": row.asked.stream is True,
            "model": row.asked.model,
            "path": row.request.path,
            "status": row.status,
            "is_complete": row.is_complete,
            "request": _compact(row.request.body),
            "response": _events(row.answer) if row.is_stream else _whole(row),
        }
    )


def _whole(row: AuditRow) -> msgspec.Raw | None:
    return _compact(row.answer) if row.is_complete and row.answer else None


def _events(stream: bytes) -> list[msgspec.Raw]:
    lines = (line for event in stream.split(_EVENT_END) for line in event.split(b"\n"))
    found = (line.removeprefix(_DATA) for line in lines if line.startswith(_DATA))
    return [_compact(data) for data in found if data != _DONE]


def _compact(text: bytes) -> msgspec.Raw:
    """On one line."""
    return msgspec.Raw(msgspec.json.format(text, indent=-1))
