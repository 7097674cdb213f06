"""One connection of the request plane: bytes on one side, frames on the other, and whether the peer lives.

A `Link` belongs to one *end*, which knows what the frames mean: `asking.AskingEnd` or `answering.AnsweringEnd`.

Silence is counted in ticks of a timer, not on a clock: a process whose own loop stood still for some seconds sees one
tick and then reads what arrived meanwhile, so it does not take its own pause for the peer's. Only a link with
open streams is watched; the asking end speaks at least every second tick, so that each side hears from a living peer.
An idle link costs nothing; whoever finds it dead finds out with the first stream that it opens there.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from dynamo.base import errors
from dynamo.protocols import wire
from dynamo.runtime import requests

_log = logging.getLogger(__name__)
TICKS = 6  # of the timer, until a silent peer counts as broken
QUIET_TICKS = 2  # until the end is asked to say something
CLOSE_S = 1.0  # how long the last bytes may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may cost us, in time and memory."""

    silence_s: float = requests.SILENCE_LIMIT_S
    connect_s: float = 3.0  # to reach a peer and be welcomed
    hello_s: float = 5.0  # for a peer to say who it is
    max_hello_bytes: int = 4096
    max_frame_bytes: int = wire.MAX_FRAME_BYTES
    max_backlog_bytes: int = 64 * 2**20  # sent, but not yet taken by the peer
    max_streams: int = 65_536  # of one connection
    max_strangers: int = 128  # connections that have not said who they are


class End(Protocol):
    """What a link's frames mean."""

    @property
    def num_streams(self) -> int:
        """How many are open."""
        ...

    def connected(self) -> None:
        """The first call: the link can be written to."""
        ...

    def received(self, frame: wire.Frame) -> None:
        """A frame came. Raises RemoteProtocolError, and the link is dropped."""
        ...

    def tick(self) -> None:
        """A tick of the timer, while streams are open."""
        ...

    def quiet(self) -> None:
        """For a while nothing was heard, or nothing said."""
        ...

    def lost(self, reason: str) -> None:
        """The last call: the link is gone; `reason` continues a sentence that names the peer."""
        ...


class Link(asyncio.Protocol):
    """A connection, from `connection_made` to the one `End.lost`."""

    def __init__(self, limits: Limits, end: End) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.reader = wire.FrameReader(limits.max_hello_bytes)
        self.was_dropped = False  # by us, for a reason
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_ticks = 0  # since the peer was heard
        self._mute_ticks = 0  # since we spoke
        self._gone = self.loop.create_future()
        self._closing_reason = "closed the connection"
        self._unsent: list[bytes] = []  # to leave at the end of this turn of the event loop
        self._end = end

    @property
    def is_lost(self) -> bool:
        return self._gone.done()

    def write(self, data: bytes) -> None:
        """Send encoded frames, all of one turn of the event loop at once: what costs is the system call.

        A peer that does not take them is dropped before they fill our memory.
        """
        if self._transport is None or self.is_lost:
            return
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent or self._transport is None or self.is_lost:
            return
        self._mute_ticks = 0
        self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        if self._transport.get_write_buffer_size() > self.limits.max_backlog_bytes:
            self.drop(f"is too slow: more than {self.limits.max_backlog_bytes} bytes wait for it")

    def drop(self, reason: str) -> None:
        """Break the connection now."""
        if self.is_lost:
            return
        if self._transport is not None:
            self._transport.abort()
        self.was_dropped = True
        self._lose(reason)

    async def close(self) -> None:
        """Send what is written, then end the connection; bounded in time."""
        if self._transport is None:
            return
        self._flush()
        self._closing_reason = "was disconnected, because we close"
        self._transport.close()
        await asyncio.wait((self._gone,), timeout=CLOSE_S)
        self.drop("did not take our last words")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = self.loop.call_later(self.limits.silence_s / TICKS, self._tick)
        self._end.connected()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        try:
            for frame in self.reader.feed(data):
                if self.is_lost:
                    return
                self._end.received(frame)
        except errors.RemoteProtocolError as error:
            self.drop(f"broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(self._closing_reason + (f" ({exc})" if exc else ""))

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self._gone.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._end.lost(reason)

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self.limits.silence_s / TICKS, self._tick)
        if not self._end.num_streams:
            self._silent_ticks = self._mute_ticks = 0
            return
        self._end.tick()
        self._silent_ticks += 1
        self._mute_ticks += 1
        if self._silent_ticks >= TICKS:
            self.drop(f"was silent for {self.limits.silence_s:g} s")
        elif max(self._silent_ticks, self._mute_ticks) >= QUIET_TICKS:
            self._end.quiet()


def supervise(callback: Callable[..., None], *arguments: Any) -> bool:
    """Call what a user of the plane gave us. Its bug is logged and costs no other stream; says if all went well."""
    try:
        callback(*arguments)
    except Exception:  # noqa: BLE001 (the supervisor of callbacks)
        _log.exception("%s failed", getattr(callback, "__qualname__", callback))
        return False
    return True
