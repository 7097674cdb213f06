"""The asking end of a connection: it numbers the streams, and hands what comes back to their receivers.

Tokens pass through `_step`: one dictionary look-up and one call each. A receiver that raises is a bug of ours, and
costs its own stream only: this is the place that supervises receivers.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.protocols import wire
from dynamo.runtime import requests
from dynamo.runtime.backends import link

_log = logging.getLogger(__name__)
_encode_body = msgspec.msgpack.Encoder().encode
# The answering side ends a stream in time; if it does not, we do, this much later, at the link's next tick: a timer of
# its own for each stream would cost more than all else that is done to open it.
BACKSTOP_S = 1.0


class AskingStream:
    """One stream that we opened."""

    __slots__ = ("_end", "_number")

    def __init__(self, end: "AskingEnd", number: int) -> None:
        self._end = end
        self._number = number

    def cancel(self) -> None:
        self._end.cancel(self._number)

    def cancel_choice(self, index: int) -> None:
        self._end.cancel_choice(self._number, index)


class AskingEnd:
    """Receivers by stream. `lost_peer` is called when the connection is gone, before the receivers hear of it."""

    def __init__(
        self,
        limits: link.Limits,
        *,
        address: str,
        name: str,
        lost_peer: Callable[["AskingEnd"], None],
    ) -> None:
        self.link = link.Link(limits, self)
        self.address = address
        self.welcomed: asyncio.Future[None] = self.link.loop.create_future()
        self._name = name
        self._lost_peer = lost_peer
        self._receivers: dict[int, requests.Receiver] = {}
        self._limits_s: dict[int, tuple[float, float]] = {}  # when to give up, and the limit
        self._last = 0  # the highest stream ever opened
        self._pings = 0
        self._farewell: str | None = None  # why the peer takes no new streams

    def open(
        self,
        endpoint: str,
        body: Any,
        receiver: requests.Receiver,
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> AskingStream:
        """Begin a stream. Raises WorkerLost, DeadlineExceeded or LocalProtocolError (the body is too long)."""
        if self.link.is_lost or self._farewell is not None:
            reason = self._farewell or "the connection is closed"
            raise errors.WorkerLost(f"worker at {self.address} takes no new requests: {reason}")
        if timeout_s is not None and timeout_s <= 0:
            raise errors.DeadlineExceeded("the request's time was over before it was sent")
        limit_s = None if timeout_s is None else min(timeout_s, wire.MAX_TIMEOUT_S)
        number = self._last + 1
        raw = msgspec.Raw(_encode_body(body))
        frame = wire.encode(wire.Open(number, endpoint, raw, dict(headers), limit_s))
        self._last = number
        self._receivers[number] = receiver
        if limit_s is not None:
            self._limits_s[number] = (self.link.loop.time() + limit_s + BACKSTOP_S, limit_s)
        self.link.write(frame)
        return AskingStream(self, number)

    def cancel(self, number: int) -> None:
        """Forget the stream and tell the peer."""
        if self._forget(number) is not None:
            self.link.write(wire.encode(wire.Cancel(number)))

    def cancel_choice(self, number: int, index: int) -> None:
        """Tell the peer, if the stream still lives."""
        if number in self._receivers:
            self.link.write(wire.encode(wire.Cancel(number, index)))

    @property
    def num_streams(self) -> int:
        return len(self._receivers)

    def connected(self) -> None:
        self.link.reader.max_frame_bytes = self.link.limits.max_frame_bytes
        self.link.write(wire.encode(wire.Hello(wire.VERSION, self._name)))

    def received(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Welcome():
                self._welcome(frame)
            case wire.Goodbye() if not self.welcomed.done():
                self.link.drop(f"refused us: {frame.reason}")
            case _ if not self.welcomed.done():
                raise errors.RemoteProtocolError(
                    f"expected Welcome first, got {type(frame).__name__}"
                )
            case wire.Step():
                self._step(frame)
            case wire.Reply():
                self._reply(frame)
            case wire.Fail():
                self._over(frame.stream, frame.error)
            case wire.Goodbye():
                self._farewell = frame.reason
            case wire.Pong():
                pass
            case _:
                raise errors.RemoteProtocolError(
                    f"a {type(frame).__name__} is not for us to receive"
                )

    def tick(self) -> None:
        now = self.link.loop.time()
        over = [(number, limit_s) for number, (at, limit_s) in self._limits_s.items() if at <= now]
        for number, limit_s in over:
            self._expire(number, limit_s)

    def quiet(self) -> None:
        self._pings += 1
        self.link.write(wire.encode(wire.Ping(self._pings)))

    def lost(self, reason: str) -> None:
        message = f"worker at {self.address} {reason}"
        if not self.welcomed.done():
            self.welcomed.set_exception(errors.WorkerLost(message))
            self.welcomed.exception()  # it is seen, even if whoever waited has left
        if self.link.was_dropped:
            _log.warning("%s", message)
        self._lost_peer(self)
        for number in list(self._receivers):
            self._over(number, errors.StreamBroken(message))

    def _welcome(self, frame: wire.Welcome) -> None:
        if self.welcomed.done():
            raise errors.RemoteProtocolError("a second Welcome")
        if frame.version != wire.VERSION:
            self.link.drop(
                f"speaks version {frame.version} of the request plane, we speak {wire.VERSION}:"
                " run the same release on both sides"
            )
            return
        self.welcomed.set_result(None)

    def _step(self, frame: wire.Step) -> None:
        receivers = self._receivers
        for item in frame.items:
            receiver = receivers.get(item.stream)
            if receiver is None:
                self._check_known(item.stream)
                continue
            try:
                receiver.receive(item.output)
            except Exception:  # noqa: BLE001 (`link.supervise`, without a call per token)
                _log.exception("%r failed", receiver)
                self._fault(item.stream)
        for number in frame.ended:
            self._over(number, None)

    def _reply(self, frame: wire.Reply) -> None:
        receiver = self._receivers.get(frame.stream)
        if receiver is None:
            self._check_known(frame.stream)
            return
        if not link.supervise(receiver.replied, frame.body):
            self._fault(frame.stream)

    def _fault(self, number: int) -> None:
        """A receiver raised: end its stream at both sides."""
        if number in self._receivers:
            self._over(number, errors.DynamoError("an internal error lost the answer; see the log"))
            self.link.write(wire.encode(wire.Cancel(number)))

    def _over(self, number: int, error: errors.DynamoError | None) -> None:
        receiver = self._forget(number)
        if receiver is None:
            self._check_known(number)
            return
        link.supervise(receiver.ended, error)

    def _forget(self, number: int) -> requests.Receiver | None:
        self._limits_s.pop(number, None)
        return self._receivers.pop(number, None)

    def _check_known(self, number: int) -> None:
        """What comes for a stream that is over crossed our cancel; what was never opened is the peer's fault."""
        if not 0 < number <= self._last:
            raise errors.RemoteProtocolError(f"stream {number} was never opened")

    def _expire(self, number: int, timeout_s: float) -> None:
        self.link.write(wire.encode(wire.Cancel(number)))
        self._over(number, errors.DeadlineExceeded(f"no complete answer within {timeout_s:g} s"))
