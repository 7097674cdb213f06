"""The answering end of a connection: it hands each stream to the handler of its endpoint and gathers what they say.

What all calls of a connection send within one turn of the event loop leaves as one `Step` frame: the first output
schedules the flush, the others join it. A `Reply` or `Fail` first flushes what was sent before it, so the order
within a stream is kept.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate, wire
from dynamo.runtime import requests
from dynamo.runtime.backends import complaints, link

_log = logging.getLogger(__name__)
_encode_body = msgspec.msgpack.Encoder().encode
# What a peer that has a token or TLS which we have not says first looks like a frame of absurd length.
_HINT = "(a peer with a cluster token or TLS, where we have none, looks like this)"


class Service:
    """What the connections of one process share: its handlers, and whether it still takes calls."""

    def __init__(self) -> None:
        self.handlers: dict[str, requests.Handler] = {}
        self.ends: set[AnsweringEnd] = set()
        self.is_draining = False
        self.complaints = complaints.Complaints()
        self._strangers: dict[AnsweringEnd, None] = {}  # who did not say hello; the oldest first
        self._num_calls = 0
        self._all_over = asyncio.Event()
        self._all_over.set()

    def met(self, end: "AnsweringEnd") -> None:
        """A stranger. When there are too many, the oldest gives way: who is honest says hello at once."""
        if len(self._strangers) >= end.link.limits.max_strangers:
            oldest = next(iter(self._strangers))
            oldest.link.drop("gave way to newer strangers, because there are too many")
        self._strangers[end] = None

    def knows(self, end: "AnsweringEnd") -> None:
        """It is no stranger any more, or gone."""
        self._strangers.pop(end, None)

    def began(self) -> None:
        self._num_calls += 1
        self._all_over.clear()

    def ended(self) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self._all_over.set()

    async def drain(self, timeout_s: float) -> bool:
        """Tell the askers, and wait for the calls that run."""
        self.is_draining = True
        for end in list(self.ends):
            end.say_goodbye("it is draining")
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_over.wait()
        except TimeoutError:
            return False
        return True


class AnsweringCall:
    """One stream that a peer opened; implements `requests.Call`."""

    __slots__ = (
        "_end",
        "_frame",
        "_is_over",
        "_on_cancel",
        "_on_choice_cancel",
        "_timer",
        "_was_cancelled",
    )

    def __init__(self, end: "AnsweringEnd", frame: wire.Open) -> None:
        self._end = end
        self._frame = frame
        self._is_over = False
        self._was_cancelled = False
        self._on_cancel: Callable[[], None] | None = None
        self._on_choice_cancel: Callable[[int], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if frame.timeout_s is not None:
            self._timer = end.link.loop.call_later(frame.timeout_s, self._expire)

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

    def on_choice_cancel(self, callback: Callable[[int], None]) -> None:
        if not self._is_over:
            self._on_choice_cancel = callback

    def send(self, output: generate.Output) -> None:
        if not self._is_over:
            self._end.put(wire.StepItem(self._frame.stream, output))

    def reply(self, value: Any) -> None:
        if not self._is_over:
            body = msgspec.Raw(_encode_body(value))
            self._end.write(wire.encode(wire.Reply(self._frame.stream, body)))

    def finish(self) -> None:
        if not self._is_over:
            self.close()
            self._end.finish(self._frame.stream)

    def fail(self, error: errors.DynamoError) -> None:
        if not self._is_over:
            self.close()
            self._end.refuse(self._frame.stream, error)

    def close(self) -> None:
        """Nothing can be said any more."""
        self._is_over = True
        # they may well refer to us: leave no cycle to the garbage collector
        self._on_cancel = self._on_choice_cancel = None
        if self._timer is not None:
            self._timer.cancel()
        self._end.forget(self._frame.stream)

    def cancel(self) -> None:
        """Nobody listens any more."""
        if not self._is_over:
            callback, self._was_cancelled = self._on_cancel, True
            self.close()
            if callback is not None:
                link.supervise(callback)

    def cancel_choice(self, index: int) -> None:
        """Nobody listens to this one any more."""
        if self._on_choice_cancel is not None:
            link.supervise(self._on_choice_cancel, index)

    def _expire(self) -> None:
        limit = f"no complete answer within {self._frame.timeout_s:g} s"
        self._end.refuse(self._frame.stream, errors.DeadlineExceeded(limit))
        self.cancel()


class AnsweringEnd:
    """Calls by stream."""

    def __init__(self, limits: link.Limits, service: Service) -> None:
        self.link = link.Link(limits, self)
        self._service = service
        self._peer: str | None = None  # who said hello
        self._hello_timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, AnsweringCall] = {}
        self._last = 0  # the highest stream ever opened
        self._items: list[wire.StepItem] = []
        self._ended: list[int] = []
        self._is_flush_due = False

    def put(self, item: wire.StepItem) -> None:
        """Into this turn's Step."""
        self._items.append(item)
        if not self._is_flush_due:
            self._schedule()

    def finish(self, number: int) -> None:
        """Complete with this turn's Step."""
        self._ended.append(number)
        if not self._is_flush_due:
            self._schedule()

    def refuse(self, number: int, error: errors.DynamoError) -> None:
        """The stream is over, by an error."""
        self.write(wire.encode(wire.Fail.of(number, error)))

    def write(self, frame: bytes) -> None:
        """After all that was sent before."""
        self._flush()
        self.link.write(frame)

    def forget(self, number: int) -> None:
        """A call is over."""
        del self._calls[number]
        self._service.ended()

    def say_goodbye(self, reason: str) -> None:
        if self._peer is not None:
            self.write(wire.encode(wire.Goodbye(reason)))

    async def close(self) -> None:
        self._flush()
        await self.link.close()

    @property
    def num_streams(self) -> int:
        return len(self._calls)

    def connected(self) -> None:
        self._service.ends.add(self)
        self._service.met(self)
        limit_s = self.link.limits.hello_s
        self._hello_timer = self.link.loop.call_later(
            limit_s, self.link.drop, f"did not say hello within {limit_s:g} s"
        )

    def received(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Hello():
                self._hello(frame)
            case _ if self._peer is None:
                raise errors.RemoteProtocolError(
                    f"expected Hello first, got {type(frame).__name__}"
                )
            case wire.Open():
                self._open(frame)
            case wire.Cancel():
                self._cancel(frame)
            case wire.Ping():
                self.link.write(wire.encode(wire.Pong(frame.number)))
            case _:
                raise errors.RemoteProtocolError(
                    f"a {type(frame).__name__} is not for us to receive"
                )

    def tick(self) -> None:
        pass  # streams here have their own timers

    def quiet(self) -> None:
        """It is the asker who keeps the link alive."""

    def lost(self, reason: str) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._service.ends.discard(self)
        self._service.knows(self)
        if self._peer is None and self.link.was_dropped:
            self._service.complaints.say(f"{reason} {_HINT}")
        elif self._calls or self.link.was_dropped:
            _log.warning("%s %s; %d requests of it end", self._peer, reason, len(self._calls))
        for call in list(self._calls.values()):
            call.cancel()

    def _hello(self, frame: wire.Hello) -> None:
        if self._peer is not None:
            raise errors.RemoteProtocolError("a second Hello")
        self.link.write(wire.encode(wire.Welcome(wire.VERSION, tuple(self._service.handlers))))
        if frame.version != wire.VERSION:
            raise errors.RemoteProtocolError(
                f"version {frame.version} of the request plane, we speak {wire.VERSION}"
            )
        self._peer = frame.peer
        self._service.knows(self)
        self.link.reader.max_frame_bytes = self.link.limits.max_frame_bytes
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._service.is_draining:
            self.say_goodbye("it is draining")

    def _open(self, frame: wire.Open) -> None:
        if frame.stream <= self._last:
            raise errors.RemoteProtocolError(
                f"stream {frame.stream} after stream {self._last}: numbers must rise"
            )
        self._last = frame.stream
        refusal = self._refusal(frame)
        if refusal is not None:
            self.refuse(frame.stream, refusal)
            return
        call = self._calls[frame.stream] = AnsweringCall(self, frame)
        self._service.began()
        if not link.supervise(self._handle, call):
            call.fail(errors.DynamoError(f"internal error in {frame.endpoint}; see its log"))

    def _handle(self, call: AnsweringCall) -> None:
        try:
            self._service.handlers[call.endpoint](call)
        except errors.DynamoError as error:
            call.fail(error)

    def _refusal(self, frame: wire.Open) -> errors.DynamoError | None:
        if self._service.is_draining:
            return errors.WorkerLost("the worker is draining: ask another")
        if frame.endpoint not in self._service.handlers:
            served = ", ".join(sorted(self._service.handlers))
            return errors.NoWorkers(f"{frame.endpoint!r} is not served here, but: {served}")
        if len(self._calls) >= self.link.limits.max_streams:
            limit = self.link.limits.max_streams
            return errors.Overloaded(f"{limit} requests are open on one connection; try later")
        return None

    def _cancel(self, frame: wire.Cancel) -> None:
        call = self._calls.get(frame.stream)
        if call is None:
            if not 0 < frame.stream <= self._last:
                raise errors.RemoteProtocolError(f"stream {frame.stream} was never opened")
        elif frame.choice is None:
            call.cancel()
        else:
            call.cancel_choice(frame.choice)

    def _schedule(self) -> None:
        self._is_flush_due = True
        self.link.loop.call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        if not self._items and not self._ended:
            return
        items, ended = self._items, self._ended
        self._items, self._ended = [], []
        self._write_step(tuple(items), tuple(ended))

    def _write_step(self, items: tuple[wire.StepItem, ...], ended: tuple[int, ...]) -> None:
        """As one frame; in halves if it would be too long."""
        try:
            frame = wire.encode(wire.Step(items, ended))
        except errors.LocalProtocolError as error:
            if len(items) > 1:
                half = len(items) // 2
                self._write_step(items[:half], ())
                self._write_step(items[half:], ended)
                return
            frame = self._give_up(items[0].stream, ended, error)
        self.link.write(frame)

    def _give_up(
        self, number: int, ended: tuple[int, ...], error: errors.LocalProtocolError
    ) -> bytes:
        """One output alone is too long for the wire: its stream fails, the others end as they should."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel()
        _log.error("stream %d of %s: %s", number, self._peer, error)
        return wire.encode(wire.Fail.of(number, error)) + wire.encode(wire.Step((), ended))
