"""The server's side of a connection: it hands each stream to the handler of its endpoint and gathers the answers.

The items that all calls of a connection send within one turn of the event loop leave as one `Step` frame: the first one
schedules the flush, the others join it. A `Reply` or `Fail` first flushes what was sent before it, so the order within
a stream is kept. So does an item of another endpoint: the bytes of each frame are counted for one endpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import clock, errors, tasks
from dynamo.observability import logs, metrics
from dynamo.protocols import wire
from dynamo.runtime import authentication, requests
from dynamo.runtime.backends import frame_connection

_log = logging.getLogger(__name__)
_encode_body = msgspec.msgpack.Encoder().encode
_MAX_NAME = 64  # characters of a client's name for the log
# The first bytes of a peer that has a token or TLS, where this process has none, look like a frame of absurd length.
_HINT = "(a peer with a cluster token or TLS, where we have none, looks like this)"


class ServerState:
    """The state that the connections of one process share: its handlers, and whether it still takes calls."""

    def __init__(self, settings: frame_connection.ConnectionSettings, instance_id: int = 0) -> None:
        self.settings = settings
        self._instance_id = instance_id
        self.handlers: dict[str, requests.Handler] = {}
        self.ended_endpoints: set[str] = set()
        self.connections: set[ServerConnection] = set()
        self.is_draining = False
        self.log = logs.PeerLog(_log, settings.time.now)
        self._pending: dict[ServerConnection, None] = {}  # said no hello yet; the oldest first
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def refuse_instance(self, meant: int) -> str | None:
        """Return the sentence for a client that means another instance than this one; None if it means this one."""
        if not meant or not self._instance_id or meant == self._instance_id:
            return None
        return f"instance {meant:x} is not at this address any more, but {self._instance_id:x} is"

    def add_pending(self, connection: "ServerConnection") -> None:
        """Add a connection that said no hello; of too many, drop the oldest: an honest peer says it at once."""
        if len(self._pending) >= self.settings.limits.max_pending:
            oldest = next(iter(self._pending))
            oldest.frames.drop("gave way to newer connections, because too many said no hello")
        self._pending[connection] = None

    def discard_pending(self, connection: "ServerConnection") -> None:
        """Remove a connection that has said hello or is gone."""
        self._pending.pop(connection, None)

    def count_call(self) -> None:
        self._num_calls += 1
        self._is_idle.clear()

    def uncount_call(self) -> None:
        """Count a call that is over."""
        self._num_calls -= 1
        if not self._num_calls:
            self._is_idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Say goodbye to all clients and wait for the open calls; return False if some were open after `timeout_s`."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.say_goodbye("it is draining")
        return await tasks.wait_until_idle(
            self._is_idle,
            lambda: self._num_calls,
            timeout_s=timeout_s,
            clock=self.settings.time,
            log=_log,
        )


class ServerCall:
    """One stream that a client opened; implements `requests.Call`."""

    __slots__ = (
        "_connection",
        "_frame",
        "_is_over",
        "_on_cancel",
        "_on_signal",
        "_response_bytes",
        "_timer",
        "_was_cancelled",
    )

    def __init__(self, connection: "ServerConnection", frame: wire.Open[msgspec.Raw]) -> None:
        self._connection = connection
        self._frame = frame
        self._response_bytes = connection.frames.traffic.responses(frame.endpoint)
        self._is_over = False
        self._was_cancelled = False
        self._on_cancel: Callable[[], None] | None = None
        self._on_signal: Callable[[int], None] | None = None
        self._timer: clock.Timer | None = None
        if frame.timeout_s is not None:
            self._timer = connection.frames.clock.call_later(frame.timeout_s, self._expire)

    @property
    def endpoint(self) -> str:
        return self._frame.endpoint

    @property
    def body(self) -> msgspec.Raw:
        return self._frame.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self._frame.headers

    def on_cancel(self, callback: Callable[[], None]) -> None:
        if self._was_cancelled:
            callback()
        elif not self._is_over:
            self._on_cancel = callback

    def on_signal(self, callback: Callable[[int], None]) -> None:
        if not self._is_over:
            self._on_signal = callback

    def send(self, item: Any) -> None:
        if not self._is_over:
            self._connection.put_item(wire.StepItem(self._frame.stream, item), self._response_bytes)

    def reply(self, value: Any) -> None:
        if not self._is_over:
            body = msgspec.Raw(_encode_body(value))
            frame = wire.encode(wire.Reply(self._frame.stream, body))
            self._response_bytes.inc(len(frame))
            self._connection.write(frame)

    def finish(self) -> None:
        if not self._is_over:
            self.close()
            self._connection.finish_stream(self._frame.stream, self._response_bytes)

    def fail(self, error: errors.DynamoError) -> None:
        if not self._is_over:
            self.close()
            self._connection.fail_stream(self._frame.stream, error)

    def close(self) -> None:
        """End the call on this side: nothing can be sent any more."""
        self._is_over = True
        # they may refer to this call: leave no cycle to the garbage collector
        self._on_cancel = self._on_signal = None
        if self._timer is not None:
            self._timer.cancel()
        self._connection.forget_call(self._frame.stream)

    def cancel(self) -> None:
        """End the call because its client is gone or waits no longer."""
        if not self._is_over:
            callback, self._was_cancelled = self._on_cancel, True
            self.close()
            if callback is not None:
                frame_connection.call_safely(callback)

    def handle_signal(self, signal: int) -> None:
        """Hand a signal of the client to the handler, if it wants signals."""
        if self._on_signal is not None:
            frame_connection.call_safely(self._on_signal, signal)

    def _expire(self) -> None:
        limit = f"no complete answer within {self._frame.timeout_s:g} s"
        self._connection.fail_stream(self._frame.stream, errors.DeadlineExceeded(limit))
        self.cancel()


class ServerConnection:
    """The server's end of one connection: its running calls, by the number of their stream."""

    def __init__(self, state: ServerState) -> None:
        self.frames = frame_connection.FrameConnection(state.settings, self)
        self._state = state
        self._peer: str | None = None  # the name in its hello
        self._hello_timer: clock.Timer | None = None
        self._calls: dict[int, ServerCall] = {}
        self._last = 0  # number of the newest stream
        self._items: list[wire.StepItem[Any]] = []
        self._ended: list[int] = []
        self._step_bytes = metrics.FastNumber()  # of the endpoint that the next Step answers
        self._is_flush_due = False

    def put_item(self, item: wire.StepItem[Any], response_bytes: metrics.FastNumber) -> None:
        """Add an item to this turn's Step, and count the frame in `response_bytes`."""
        if response_bytes is not self._step_bytes:
            self._begin_step(response_bytes)
        self._items.append(item)
        if not self._is_flush_due:
            self._schedule()

    def finish_stream(self, number: int, response_bytes: metrics.FastNumber) -> None:
        """Complete a stream with this turn's Step, and count the frame in `response_bytes`."""
        if response_bytes is not self._step_bytes:
            self._begin_step(response_bytes)
        self._ended.append(number)
        if not self._is_flush_due:
            self._schedule()

    def fail_stream(self, number: int, error: errors.DynamoError) -> None:
        self.write(wire.encode(wire.Fail.of(number, error)))

    def write(self, frame: bytes) -> None:
        """Send a frame after all items that were put before."""
        self._flush()
        self.frames.write(frame)

    def forget_call(self, number: int) -> None:
        """Remove a call that is over."""
        del self._calls[number]
        self._state.uncount_call()

    def say_goodbye(self, reason: str) -> None:
        if self._peer is not None:
            self.write(wire.encode(wire.Goodbye(reason)))

    async def close(self) -> None:
        self._flush()
        await self.frames.close()

    @property
    def num_streams(self) -> int:
        return len(self._calls)

    @property
    def limit_ticks(self) -> int:
        return frame_connection.CALLER_PATIENCE * frame_connection.TICKS

    def handle_connected(self) -> None:
        self._state.connections.add(self)
        self._state.add_pending(self)
        limit_s = self.frames.limits.hello_s
        self._hello_timer = self.frames.clock.call_later(
            limit_s, self.frames.drop, f"did not say hello within {limit_s:g} s"
        )

    def handle_frame(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Hello():
                self._handle_hello(frame)
            case _ if self._peer is None:
                raise errors.RemoteProtocolError(
                    f"expected Hello first, got {type(frame).__name__}"
                )
            case wire.Open():
                self._handle_open(frame)
            case wire.Cancel():
                self._handle_cancel(frame)
            case wire.Ping():
                self.frames.write(wire.encode(wire.Pong(frame.number)))
                self.frames.flush()  # before what comes behind it, which may end this process
            case _:
                raise errors.RemoteProtocolError(
                    f"a {type(frame).__name__} cannot be received by a server"
                )

    def handle_read(self) -> None:
        pass  # each frame has been handled for itself

    def handle_tick(self) -> None:
        """Do nothing: calls have their own timers."""

    def handle_quiet(self) -> None:
        """Do nothing: the client keeps the connection alive."""

    def handle_silent(self, reason: str) -> None:
        self.frames.drop(reason)

    def handle_lost(self, reason: str) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._state.connections.discard(self)
        self._state.discard_pending(self)
        if self._peer is None and self.frames.was_dropped:
            host = self.frames.peer_host
            hint = f" {_HINT}" if reason.startswith("broke") else ""
            line = authentication.describe_dropped(host, f"{reason}{hint}")
            self._state.log.warning(host, "%s", line)
        elif self._calls or self.frames.was_dropped:
            self._state.log.warning(
                self.frames.peer_host,
                "%s %s; %d requests of it end",
                self._peer,
                reason,
                len(self._calls),
            )
        for call in list(self._calls.values()):
            call.cancel()

    def _handle_hello(self, frame: wire.Hello) -> None:
        if self._peer is not None:
            raise errors.RemoteProtocolError("a second Hello")
        if refusal := self._state.refuse_instance(frame.instance):
            self.frames.refuse(wire.encode(wire.Goodbye(refusal)), f"means another: {refusal}")
            return
        self.frames.write(wire.encode(wire.Welcome(wire.VERSION, tuple(self._state.handlers))))
        if frame.version != wire.VERSION:
            raise errors.RemoteProtocolError(
                f"version {frame.version} of the request plane, we speak {wire.VERSION}"
            )
        self._peer = frame.peer[:_MAX_NAME]
        self._state.discard_pending(self)
        self.frames.reader.max_frame_bytes = self.frames.limits.max_frame_bytes
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._state.is_draining:
            self.say_goodbye("it is draining")

    def _handle_open(self, frame: wire.Open[msgspec.Raw]) -> None:
        if frame.stream <= self._last:
            raise errors.RemoteProtocolError(
                f"stream {frame.stream} after stream {self._last}: numbers must rise"
            )
        self._last = frame.stream
        refusal = self._refusal(frame)
        if refusal is not None:
            self.fail_stream(frame.stream, refusal)
            return
        call = self._calls[frame.stream] = ServerCall(self, frame)
        self._state.count_call()
        if not frame_connection.call_safely(self._run_handler, call):
            call.fail(errors.DynamoError(f"internal error in {frame.endpoint}; see its log"))

    def _run_handler(self, call: ServerCall) -> None:
        try:
            self._state.handlers[call.endpoint](call)
        except errors.DynamoError as error:
            call.fail(error)

    def _refusal(self, frame: wire.Open[msgspec.Raw]) -> errors.DynamoError | None:
        if self._state.is_draining:
            return errors.WorkerLost("the worker is draining: ask another")
        if refusal := self._state.refuse_instance(frame.instance):
            return errors.WorkerLost(refusal)
        if frame.endpoint in self._state.ended_endpoints:
            return errors.WorkerLost(f"{frame.endpoint} is not served here any more: ask another")
        if frame.endpoint not in self._state.handlers:
            served = ", ".join(sorted(self._state.handlers))
            return errors.NoWorkers(f"{frame.endpoint!r} is not served here, but: {served}")
        if len(self._calls) >= self.frames.limits.max_streams:
            limit = self.frames.limits.max_streams
            return errors.Overloaded(f"{limit} requests are open on one connection; try later")
        return None

    def _handle_cancel(self, frame: wire.Cancel) -> None:
        call = self._calls.get(frame.stream)
        if call is None:
            if not 0 < frame.stream <= self._last:
                raise errors.RemoteProtocolError(f"stream {frame.stream} was never opened")
        elif frame.signal is None:
            call.cancel()
        else:
            call.handle_signal(frame.signal)

    def _schedule(self) -> None:
        self._is_flush_due = True
        self.frames.loop.call_soon(self._flush_due)

    def _begin_step(self, response_bytes: metrics.FastNumber) -> None:
        """Write what answers another endpoint, so that each Step is counted for one."""
        self._flush()
        self._step_bytes = response_bytes

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        if not self._items and not self._ended:
            return
        items, streams = self._items, self._ended
        self._items, self._ended = [], []
        self._write_step(tuple(items), tuple(streams))

    def _write_step(self, items: tuple[wire.StepItem[Any], ...], ended: tuple[int, ...]) -> None:
        """Write one Step frame; in halves if it would be too long, or an item of it cannot be sent at all."""
        try:
            frame = wire.encode(wire.Step(items, ended))
        except (errors.LocalProtocolError, TypeError, OverflowError, ValueError) as error:
            if len(items) > 1:
                half = len(items) // 2
                self._write_step(items[:half], ())
                self._write_step(items[half:], ended)
                return
            frame = self._drop_item(items[0].stream, ended, error)
        self._step_bytes.inc(len(frame))
        self.frames.write(frame)

    def _drop_item(self, number: int, ended: tuple[int, ...], error: Exception) -> bytes:
        """Fail a stream with an item that the wire does not take; the others end as they should."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel()
        _log.error("stream %d of %s: %s", number, self._peer, error)
        failure = errors.LocalProtocolError(str(error))
        return wire.encode(wire.Fail.of(number, failure)) + wire.encode(wire.Step((), ended))
