"""One connection of the request plane: bytes on one side, frames on the other, and the watch over its peer.

A `FrameConnection` belongs to one handler, which knows what the frames mean: `client_connection.ClientConnection` or
`server_connection.ServerConnection`.

Silence is counted in ticks of a timer, and a tick that comes late counts nothing: a process that stood still itself
reads what arrived meanwhile and gives the peer the whole time again, so it does not take its own pause for the peer's.
It does so `LATE_TICKS` times: where each tick is late, a peer that never comes back is given up as well, within ten
times the limit and some.
Only a connection with open streams, or that waits for an answer, is watched; the client speaks at least every second
tick, and after a pause at once, so that each side hears from a living peer. Items of other streams prove nothing for a
request that was just sent: where long packets vanish in one direction, it never arrives, though the other direction
lives. So the client sends a ping behind new streams, and a peer that does not answer it is as silent as one that says
nothing. A slow wire is not silence: ticks at which the peer's host, or over NATS the peer, has taken some of what has
waited for it count nothing.

A client gives up its peer after `TICKS`, or after `EARLY_TICKS` if all streams of the connection ask for it. A server
waits `CALLER_PATIENCE` times as long for its client: to give up a worker moves its streams, to give up a client that
only stood still would end them all. An idle connection costs nothing; that it is dead is found out with the first
stream that is opened there.
"""

import asyncio
import fcntl
import logging
import ssl
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from dynamo.base import clock, errors
from dynamo.protocols import wire
from dynamo.runtime import authentication, requests

_log = logging.getLogger(__name__)
TICKS = 6  # of the timer, until a silent peer counts as broken
EARLY_TICKS = 4  # if all streams are opened with `gives_up_early`
LATE_TICKS = 30  # that count nothing until the peer is heard again; each is two long at least
CALLER_PATIENCE = 5  # times as long a server waits for a silent client
QUIET_TICKS = 2  # until the handler is asked to send something
CLOSE_S = 1.0  # how long the last bytes may take
_INT = struct.Struct("i")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The time and memory that a peer may cost."""

    silence_s: float = requests.SILENCE_LIMIT_S
    connect_s: float = 3.0  # to reach a peer and be welcomed
    hello_s: float = 5.0  # for a peer to authenticate itself, and again to say hello
    max_hello_bytes: int = 4096
    max_frame_bytes: int = wire.MAX_FRAME_BYTES
    max_backlog_bytes: int = 64 * 2**20  # sent, but not yet taken by the peer
    max_streams: int = 65_536  # of one connection
    max_pending: int = 128  # connections that have not said hello yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """The limits, the clock, the frame decoder and the byte counts that all connections of one plane share."""

    limits: ConnectionLimits
    time: clock.Clock
    decode: wire.Decode
    traffic: requests.Traffic = field(default_factory=requests.Traffic)


class FrameHandler(Protocol):
    """One end's streams over a `FrameConnection`, which calls these methods on the event loop."""

    @property
    def num_streams(self) -> int:
        """The number of open streams."""
        ...

    @property
    def limit_ticks(self) -> int:
        """The ticks of silence after which the peer counts as silent."""
        ...

    def handle_connected(self) -> None:
        """Take the first call: the connection can be written to."""
        ...

    def handle_frame(self, frame: wire.Frame) -> None:
        """Take a frame of the peer. Raises RemoteProtocolError, and the connection is dropped."""
        ...

    def handle_read(self) -> None:
        """Take note that all frames that came at once have been handled."""
        ...

    def handle_tick(self) -> None:
        """Take a tick of the timer, while streams are open."""
        ...

    def handle_quiet(self) -> None:
        """Take note that for a while nothing was received, or nothing sent."""
        ...

    def handle_silent(self, reason: str) -> None:
        """Take note, at each tick, that the peer is silent beyond the limit: drop the connection, or bear it."""
        ...

    def handle_lost(self, reason: str) -> None:
        """Take the last call: the connection is gone; `reason` continues a sentence that names the peer."""
        ...


class FrameConnection(asyncio.Protocol):
    """A connection, from `connection_made` to the one `FrameHandler.handle_lost`."""

    def __init__(self, settings: ConnectionSettings, handler: FrameHandler) -> None:
        self.limits = settings.limits
        self.clock = settings.time
        self.traffic = settings.traffic
        self.loop = asyncio.get_running_loop()
        self.reader = wire.FrameReader(self.limits.max_hello_bytes, decode=settings.decode)
        self.is_lost = False
        self.was_dropped = False  # by this side, for a reason
        self.was_ended_by_peer = False  # its process closed the connection, or its host did for it
        self._transport: asyncio.Transport | None = None
        self._timer: clock.Timer | None = None
        self._tick_due_at = 0.0
        self._silent_ticks = 0  # that came in time since the peer was heard
        self._unanswered_ticks: int | None = None  # since its last answer; None: it owes none
        self._late_ticks = 0  # since the peer was heard, or since its last answer if it owes one
        self._mute_ticks = 0  # since this side sent something
        self._waiting_bytes = 0  # at the last tick: sent, but not taken by the peer's host
        self._new_bytes = 0  # sent since that tick; what waits beside these is older
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._closing_reason = "closed the connection"
        self._is_closing = False  # at the request of this side
        self._unsent: list[bytes] = []  # to leave at the end of this turn of the event loop
        self._handler = handler

    @property
    def peer_host(self) -> str:
        """The address of the peer's host; empty where the network does not tell it."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    @property
    def is_overdue(self) -> bool:
        """Return whether the peer is silent beyond the limit."""
        return max(self._silent_ticks, self._unanswered_ticks or 0) >= self._handler.limit_ticks

    def expect_answer(self) -> None:
        """Take note that the peer owes an answer from now on, if it does not already."""
        self._unanswered_ticks = self._unanswered_ticks or 0

    def note_answer(self, *, is_last: bool) -> None:
        """Take note of an answer; `is_last`: the peer owes no other."""
        self._unanswered_ticks = None if is_last else 0
        self._late_ticks = 0

    def write(self, data: bytes) -> None:
        """Send encoded frames, all of one turn of the event loop in one system call, which is what costs.

        A peer that does not take them is dropped before they fill the memory.
        """
        if self._transport is None or self.is_lost:
            return
        if not self._unsent:
            self.loop.call_soon(self.flush)
        self._unsent.append(data)

    def flush(self) -> None:
        """Send now what is written."""
        unsent, self._unsent = self._unsent, []
        if not unsent or self._transport is None or self.is_lost:
            return
        if self._timer is None:
            self._schedule_tick()
        self._mute_ticks = 0
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        self.traffic.sent.value += len(data)
        self._new_bytes += len(data)
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > self.limits.max_backlog_bytes:
            self.drop(f"is too slow: more than {self.limits.max_backlog_bytes} bytes wait for it")

    def drop(self, reason: str) -> None:
        """Break the connection now."""
        if self.is_lost:
            return
        if self._transport is not None:
            self._transport.abort()
        self.was_dropped = True
        self._end(reason)

    def refuse(self, last_frame: bytes, reason: str) -> None:
        """Send a last frame and end the connection."""
        if self._transport is None or self.is_lost:
            return
        self._unsent.append(last_frame)
        self.flush()
        self._transport.close()
        self.was_dropped = True
        self._end(reason)

    async def close(self) -> None:
        """Send what is written, then end the connection; takes `CLOSE_S` at most."""
        if self._transport is None:
            return
        self.flush()
        self._closing_reason = "was disconnected, because we close"
        self._is_closing = True
        self._transport.close()
        try:
            async with self.clock.timeout(CLOSE_S):
                await asyncio.shield(self._closed)
        except TimeoutError:
            self.drop("did not take our last words")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._schedule_tick()
        self._handler.handle_connected()

    def data_received(self, data: bytes) -> None:
        self.traffic.received.value += len(data)
        self._silent_ticks = 0
        if self._unanswered_ticks is None:
            self._late_ticks = 0
        if self._timer is None:
            self._schedule_tick()
        try:
            for frame in self.reader.feed(data):
                if self.is_lost:
                    return
                self._handler.handle_frame(frame)
            self._handler.handle_read()
        except errors.RemoteProtocolError as error:
            self.drop(f"broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_ended_by_peer = not self._is_closing and isinstance(
            exc, ConnectionResetError | BrokenPipeError | None
        )
        if isinstance(exc, ssl.SSLError):
            self._end(authentication.describe_tls_failure(exc))
            return
        self._end(self._closing_reason + (f" ({exc})" if exc else ""))

    def _end(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._closed.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._handler.handle_lost(reason)

    def _schedule_tick(self) -> None:
        tick_s = self.limits.silence_s / TICKS
        self._tick_due_at = self.clock.now() + tick_s
        self._timer = self.clock.call_later(tick_s, self._tick)

    def _tick(self) -> None:
        is_late = self.clock.now() - self._tick_due_at > self.limits.silence_s / TICKS
        if not self._handler.num_streams and self._unanswered_ticks is None:
            self._silent_ticks = self._mute_ticks = self._late_ticks = self._waiting_bytes = 0
            self._timer = None  # the next frame, in either direction, starts it again
            return
        self._schedule_tick()
        self._handler.handle_tick()
        num_before, self._waiting_bytes = self._waiting_bytes, count_waiting_bytes(self._transport)
        is_slowly_taken = 0 < self._waiting_bytes - self._new_bytes < num_before
        self._new_bytes = 0
        self._late_ticks += is_late
        is_excused = is_late and self._late_ticks <= LATE_TICKS
        is_counted = not is_excused and not is_slowly_taken
        self._silent_ticks = self._silent_ticks + 1 if is_counted else 0
        if self._unanswered_ticks is not None:
            self._unanswered_ticks = self._unanswered_ticks + 1 if is_counted else 0
        self._mute_ticks += 1
        if self.is_overdue:
            limit_ticks = self._handler.limit_ticks
            limit_s = self.limits.silence_s * limit_ticks / TICKS
            is_heard = self._silent_ticks < limit_ticks
            self._handler.handle_silent(
                f"did not answer for {limit_s:.2g} s, though it was heard: what we send may be lost"
                if is_heard
                else f"was silent for {limit_s:.2g} s"
            )
        if self.is_lost:
            return
        if is_late or max(self._silent_ticks, self._mute_ticks) >= QUIET_TICKS:
            self._handler.handle_quiet()


def count_waiting_bytes(transport: asyncio.Transport | None) -> int:
    """Return the bytes that the peer has not got; of a TCP connection, those that its host has not acknowledged."""
    if transport is None:
        return 0
    if (sock := transport.get_extra_info("socket")) is None:
        return int(transport.get_extra_info("waiting_bytes", 0))
    try:
        unacknowledged = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
    except (OSError, ValueError):  # its end has not been reported yet
        return 0
    return transport.get_write_buffer_size() + int(_INT.unpack(unacknowledged)[0])


def call_safely(callback: Callable[..., None], *arguments: Any) -> bool:
    """Call a user's callback and return True, or log its error, which must not harm other streams, and return False."""
    try:
        callback(*arguments)
    except Exception:  # noqa: BLE001 (the supervisor of callbacks)
        _log.exception("%s failed", getattr(callback, "__qualname__", callback))
        return False
    return True
