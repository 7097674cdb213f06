"""The client's side of a connection: it numbers the streams and hands the answers to their receivers.

Items pass through `_handle_step`: one dictionary look-up and one call each. A receiver that raises is a bug of this
process and costs its own stream only: this is the place that supervises receivers.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.base import errors
from dynamo.protocols import wire
from dynamo.runtime import requests
from dynamo.runtime.backends import frame_connection

_log = logging.getLogger(__name__)
# The server ends a stream at its time limit; if it does not, the client does, this much later, at the connection's next
# tick: a timer of its own for each stream would cost more than all else that is done to open it.
BACKSTOP_S = 1.0
_HINT = (
    " before it welcomed us: see its log; one that wants a cluster token (--cluster-token-file) or certificates"
    " (--cluster-tls-cert-path) of us looks like this"
)


class ClientStream:
    """One stream that this process opened; implements `requests.Stream`."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: "ClientConnection", number: int) -> None:
        self._connection = connection
        self._number = number

    def cancel(self) -> None:
        self._connection.cancel_stream(self._number)

    def send_signal(self, signal: int) -> None:
        self._connection.send_signal(self._number, signal)


class ClientConnection:
    """The receivers of one connection by stream. When it is gone, `on_lost` is called first, then the receivers."""

    def __init__(
        self,
        settings: frame_connection.ConnectionSettings,
        *,
        address: str,
        instance_id: int,
        name: str,
        on_lost: Callable[["ClientConnection"], None],
    ) -> None:
        self.frames = frame_connection.FrameConnection(settings, self)
        self.address = address
        self.instance_id = instance_id
        self.welcomed: asyncio.Future[None] = self.frames.loop.create_future()
        self._name = name
        self._on_lost = on_lost
        self._receivers: dict[int, requests.Receiver] = {}
        self._deadlines: dict[int, tuple[float, float]] = {}  # when to give up, and the limit in s
        self._may_move: dict[int, Callable[[], bool]] = {}
        self._early: set[int] = set()  # streams that give up a silent peer early
        self._steps: list[wire.Step[Any]] = []  # of what is being read
        self._is_borne = False  # silent, and the only one that can answer
        self._last = 0  # number of the newest stream
        self._pings = 0
        self._unproven: dict[int, int] = {}  # streams that may not have arrived, by the ping before
        self._last_pinged = 0  # the newest stream that a ping was sent behind
        self._goodbye: str | None = None  # why the peer takes no new streams
        self.idle_since = self.frames.clock.now()  # if it has no streams

    def open_stream(
        self,
        endpoint: str,
        body: Any,
        receiver: requests.Receiver,
        headers: Mapping[str, str],
        timeout_s: float | None,
        may_move: Callable[[], bool] | None = None,
        *,
        gives_up_early: bool = False,
        needs_proof: bool = False,
    ) -> ClientStream:
        """Open a stream, as `requests.RequestPlane.open` does.

        With `needs_proof` a peer that dies counts as `WorkerDied` only if the stream has certainly arrived.
        Raises WorkerLost, DeadlineExceeded or LocalProtocolError (the body is too long).
        """
        if not self.takes_requests:
            reason = self._goodbye or "the connection is closed"
            raise errors.WorkerLost(f"worker at {self.address} takes no new requests: {reason}")
        if timeout_s is not None and timeout_s <= 0:
            raise errors.DeadlineExceeded("the request's time was over before it was sent")
        limit_s = None if timeout_s is None else min(timeout_s, wire.MAX_TIMEOUT_S)
        number = self._last + 1
        frame = wire.encode(
            wire.Open(number, endpoint, body, dict(headers), limit_s, self.instance_id)
        )
        self._last = number
        self._receivers[number] = receiver
        if may_move is not None:
            self._may_move[number] = may_move
        if gives_up_early:
            self._early.add(number)
        if limit_s is not None:
            self._deadlines[number] = (self.frames.clock.now() + limit_s + BACKSTOP_S, limit_s)
        if needs_proof:
            # the peer answers the ping at once, before the stream can be what it dies of
            self._ping()
            self._unproven[self._pings] = number
        self.frames.write(frame)
        return ClientStream(self, number)

    def cancel_stream(self, number: int) -> None:
        """Forget the stream and tell the server."""
        if self._forget(number) is not None:
            self.frames.write(wire.encode(wire.Cancel(number)))

    def send_signal(self, number: int, signal: int) -> None:
        """Send the handler of a stream a signal; does nothing if the stream is over."""
        if number in self._receivers:
            self.frames.write(wire.encode(wire.Cancel(number, signal)))

    @property
    def is_silent(self) -> bool:
        """Return whether the peer is silent for too long, and only kept because no other can take over."""
        return self._is_borne

    @property
    def takes_requests(self) -> bool:
        """Return whether a new stream could be opened."""
        return not self.frames.is_lost and self._goodbye is None

    @property
    def num_streams(self) -> int:
        return len(self._receivers)

    @property
    def limit_ticks(self) -> int:
        is_early = len(self._early) == len(self._receivers)
        return frame_connection.EARLY_TICKS if is_early else frame_connection.TICKS

    def handle_connected(self) -> None:
        self.frames.reader.max_frame_bytes = self.frames.limits.max_frame_bytes
        self.frames.write(wire.encode(wire.Hello(wire.VERSION, self._name, self.instance_id)))

    def handle_frame(self, frame: wire.Frame) -> None:
        if self._is_borne:
            self._is_borne = self.frames.is_overdue
        match frame:
            case wire.Welcome():
                self._handle_welcome(frame)
            case wire.Goodbye() if not self.welcomed.done():
                self.frames.drop(f"refused us: {frame.reason}")
            case _ if not self.welcomed.done():
                raise errors.RemoteProtocolError(
                    f"expected Welcome first, got {type(frame).__name__}"
                )
            case wire.Step():
                self._steps.append(frame)
            case wire.Reply():
                self._handle_reply(frame)
            case wire.Fail():
                self.handle_read()
                self._end_stream(frame.stream, frame.error)
            case wire.Goodbye():
                self._goodbye = frame.reason
            case wire.Pong():
                self._unproven.pop(frame.number, None)
                self.frames.note_answer(is_last=frame.number == self._pings)
            case _:
                raise errors.RemoteProtocolError(
                    f"a {type(frame).__name__} cannot be received by a client"
                )

    def handle_read(self) -> None:
        """Hand over the items of the steps that came at once, those of one stream together."""
        steps, self._steps = self._steps, []
        if len(steps) == 1:
            self._handle_step(steps[0])
            return
        items_by_stream: dict[int, list[Any]] = {}
        for step in steps:
            for item in step.items:
                if (items := items_by_stream.get(item.stream)) is None:
                    items = items_by_stream[item.stream] = []
                items.append(item.item)
        for number, items in items_by_stream.items():
            self._hand_over(number, items)
        for step in steps:
            for number in step.ended:
                self._end_stream(number, None)

    def handle_tick(self) -> None:
        now = self.frames.clock.now()
        late = [(number, limit_s) for number, (at, limit_s) in self._deadlines.items() if at <= now]
        for number, limit_s in late:
            self.frames.write(wire.encode(wire.Cancel(number)))
            self._end_stream(
                number, errors.DeadlineExceeded(f"no complete answer within {limit_s:g} s")
            )
        if self._last > self._last_pinged:
            self.handle_quiet()

    def check_idle_peer(self) -> None:
        """Ask a peer without streams for an answer; one that gives none is given up as with streams."""
        if not self._receivers:
            self._ping()

    def handle_quiet(self) -> None:
        """Send a ping behind the newest stream."""
        self._last_pinged = self._last
        self._ping()

    def _ping(self) -> None:
        self._pings += 1
        self.frames.expect_answer()
        self.frames.write(wire.encode(wire.Ping(self._pings)))

    def handle_silent(self, reason: str) -> None:
        """Give up the streams that another peer can take over; without others left, the connection too."""
        movable = [
            number
            for number in self._receivers
            if (may_move := self._may_move.get(number)) is None or may_move()
        ]
        if len(movable) == len(self._receivers):
            self.frames.drop(reason)
            return
        if not self._is_borne:
            self._is_borne = True
            _log.warning("worker at %s %s; no other can take over", self.address, reason)
        for number in movable:
            self.frames.write(wire.encode(wire.Cancel(number)))
            self._end_stream(number, errors.StreamBroken(f"worker at {self.address} {reason}"))

    def handle_lost(self, reason: str) -> None:
        message = f"worker at {self.address} {reason}"
        if not self.welcomed.done():  # the task that connects logs it
            hint = _HINT if reason.startswith(("closed", "broke")) else ""
            self.welcomed.set_exception(errors.WorkerLost(f"{message}{hint}"))
            self.welcomed.exception()  # marked as retrieved, even if the waiting task has left
        elif self.frames.was_dropped:
            _log.warning("%s", message)
        self._on_lost(self)
        unproven = set(self._unproven.values())
        for number in list(self._receivers):
            has_died = self.frames.was_ended_by_peer and number not in unproven
            broken = errors.WorkerDied if has_died else errors.StreamBroken
            self._end_stream(number, broken(message))

    def _handle_welcome(self, frame: wire.Welcome) -> None:
        if self.welcomed.done():
            raise errors.RemoteProtocolError("a second Welcome")
        if frame.version != wire.VERSION:
            self.frames.drop(
                f"speaks version {frame.version} of the request plane, we speak {wire.VERSION}:"
                " run the same release on both sides"
            )
            return
        self.welcomed.set_result(None)

    def _handle_step(self, frame: wire.Step[Any]) -> None:
        receivers = self._receivers
        for item in frame.items:
            receiver = receivers.get(item.stream)
            if receiver is None:
                self._check_number(item.stream)
                continue
            try:
                receiver.receive(item.item)
            except Exception:  # noqa: BLE001 (`call_safely`, without a call per item)
                _log.exception("%r failed", receiver)
                self._fail_stream(item.stream)
        for number in frame.ended:
            self._end_stream(number, None)

    def _hand_over(self, number: int, items: Sequence[Any]) -> None:
        """Give several items to the receiver of a stream, which may cancel it after any of them."""
        receiver = self._receivers.get(number)
        if receiver is None:
            self._check_number(number)
            return
        receive_all = getattr(receiver, "receive_all", None)
        try:
            if receive_all is not None:
                receive_all(items)
                return
            for item in items:
                if number not in self._receivers:
                    return
                receiver.receive(item)
        except Exception:  # noqa: BLE001 (`call_safely`, for one call or many)
            _log.exception("the receiver of stream %d failed", number)
            self._fail_stream(number)

    def _handle_reply(self, frame: wire.Reply) -> None:
        self.handle_read()
        receiver = self._receivers.get(frame.stream)
        if receiver is None:
            self._check_number(frame.stream)
            return
        if not frame_connection.call_safely(receiver.replied, frame.body):
            self._fail_stream(frame.stream)

    def _fail_stream(self, number: int) -> None:
        """End the stream of a receiver that raised, at both sides."""
        if number in self._receivers:
            self._end_stream(
                number, errors.DynamoError("an internal error lost the answer; see the log")
            )
            self.frames.write(wire.encode(wire.Cancel(number)))

    def _end_stream(self, number: int, error: errors.DynamoError | None) -> None:
        receiver = self._forget(number)
        if receiver is None:
            self._check_number(number)
            return
        frame_connection.call_safely(receiver.ended, error)

    def _forget(self, number: int) -> requests.Receiver | None:
        self._deadlines.pop(number, None)
        self._may_move.pop(number, None)
        self._early.discard(number)
        receiver = self._receivers.pop(number, None)
        if not self._receivers:
            self.idle_since = self.frames.clock.now()
        return receiver

    def _check_number(self, number: int) -> None:
        """Ignore a frame that crossed its stream's cancellation. Raises RemoteProtocolError for unknown numbers."""
        if not 0 < number <= self._last:
            raise errors.RemoteProtocolError(f"stream {number} was never opened")
