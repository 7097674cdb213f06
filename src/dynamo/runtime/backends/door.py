"""Before a connection becomes a link: TLS, and the proof that both sides know the cluster's token.

A door stands where the link will stand, and hands the connection over when the peer has proven who it is. From then on
it is not there: a token costs nothing per frame.

Strangers cost little: a door holds some bytes for a few seconds, and a porch has so many doors at most. When it is
full, a newcomer takes the place of the oldest from the host that has most of them, so that one host's flood takes the
places of that host only.
"""

import abc
import asyncio
import collections
import logging
import secrets
from typing import cast

from dynamo.base import errors, membership, proof
from dynamo.protocols import wire
from dynamo.runtime.backends import complaints, link, multiplex

PURPOSE = "request plane"

_log = logging.getLogger(__name__)


class Door(asyncio.Protocol, abc.ABC):
    """What both sides have in common. `failed` is called with a reason that continues a sentence naming the peer."""

    def __init__(self, steps: proof.Steps | None, make_link: multiplex.MakeLink) -> None:
        """Without steps there is nothing to prove: TLS has done it."""
        self._exchange = None if steps is None else proof.Exchange(steps)
        self._make_link = make_link
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._begin(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data before a connection"
        assert self._exchange is not None, "without an exchange it opens at once"
        if self._transport.is_closing():
            return
        try:
            said = self._exchange.feed(data)
        except errors.RemoteProtocolError as error:
            self._refuse(str(error))
            return
        if said:
            self._transport.write(said)
        if self._exchange.is_over:
            self._open(self._transport, self._exchange.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        cause = f" ({exc})" if exc else ""
        self.failed(f"closed the connection before it had proven that it is one of us{cause}")

    @abc.abstractmethod
    def failed(self, reason: str) -> None:
        """It will never open."""

    def _begin(self, transport: asyncio.Transport, early: bytes = b"") -> None:
        """The connection is ready for us; `early` came already."""
        self._transport = transport
        if self._exchange is None:
            self._open(transport, early)
            return
        if self._exchange.first_words:
            transport.write(self._exchange.first_words)
        if early:
            self.data_received(early)

    def _open(self, transport: asyncio.Transport, early: bytes) -> None:
        made = self._make_link()
        transport.set_protocol(made)
        made.connection_made(transport)
        if early:
            made.data_received(early)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        self.failed(reason)
        self._transport.close()


class AskingDoor(Door):
    """Of the side that connected. `opened` is done when the link has the connection, or fails with WorkerLost."""

    def __init__(
        self, credentials: membership.Credentials, make_link: multiplex.MakeLink, address: str
    ) -> None:
        key = credentials.key(PURPOSE)
        super().__init__(None if key is None else proof.ask(key, _nonce()), make_link)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address

    def failed(self, reason: str) -> None:
        if not self.opened.done():
            message = f"worker at {self._address} {reason}"
            _log.warning("%s", message)
            self.opened.set_exception(errors.WorkerLost(message))
            self.opened.exception()  # it is seen, even if whoever waited has left

    def abandon(self) -> None:
        """Nobody waits any more."""
        self.opened.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _open(self, transport: asyncio.Transport, early: bytes) -> None:
        super()._open(transport, early)
        if not self.opened.done():
            self.opened.set_result(None)


class AnsweringDoor(Door):
    """Of the side that listens: it secures the connection first, and does all within a time."""

    def __init__(self, porch: "Porch") -> None:
        key = porch.credentials.key(PURPOSE)
        super().__init__(None if key is None else proof.answer(key, _nonce()), porch.make_link)
        self._porch = porch
        self._early = b""  # came before we heard that TLS is up
        self.host = ""  # where the peer is
        self._raw: asyncio.Transport | None = None
        self._securing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self.host = transport.get_extra_info("peername", ("",))[0]
        loop, limit_s = asyncio.get_running_loop(), self._porch.limits.hello_s
        self._timer = loop.call_later(
            limit_s, self.drop, f"did not prove within {limit_s:g} s that it is one of us"
        )
        self._porch.came(self)
        if self._porch.credentials.tls is None:
            self._begin(self._raw)
        else:
            self._raw.pause_reading()  # its first bytes are for TLS
            self._securing = loop.create_task(self._secure(self._raw, self._porch.credentials.tls))

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            self._early += data
        else:
            super().data_received(data)

    def drop(self, reason: str) -> None:
        """Break the connection now."""
        self.failed(reason)
        if self._raw is not None:
            self._raw.abort()

    def failed(self, reason: str) -> None:
        if self._leave():
            self._porch.complaints.say(reason)

    def _leave(self) -> bool:
        """Out of the porch, one way or the other; says whether we were there."""
        if self._timer is not None:
            self._timer.cancel()
        return self._porch.left(self)

    async def _secure(self, transport: asyncio.Transport, tls: membership.Tls) -> None:
        limit_s = self._porch.limits.hello_s
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self, tls.answering, server_side=True, ssl_handshake_timeout=limit_s
            )
        except OSError as error:  # ssl's errors are some too
            self.drop(f"is not one of us by TLS: {error}")
            return
        if (
            secured is None
        ):  # that is how start_tls says it, too, and how we find that we dropped it
            self.drop("closed the connection")
            return
        self._begin(secured, self._early)

    def _open(self, transport: asyncio.Transport, early: bytes) -> None:
        if self._leave():
            super()._open(transport, early)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(wire.Goodbye(f"the peer {reason}")))
        super()._refuse(reason)


class Porch:
    """The doors of one listener."""

    def __init__(
        self,
        limits: link.Limits,
        credentials: membership.Credentials,
        make_link: multiplex.MakeLink,
    ) -> None:
        self.limits, self.credentials, self.make_link = limits, credentials, make_link
        self.complaints = complaints.Complaints()
        self._doors: dict[AnsweringDoor, None] = {}  # the oldest first

    def came(self, door: AnsweringDoor) -> None:
        """One more stranger."""
        if len(self._doors) >= self.limits.max_strangers:
            self._oldest_of_most().drop("gave way to newer strangers, because there are too many")
        self._doors[door] = None

    def left(self, door: AnsweringDoor) -> bool:
        """It is no stranger any more, or gone; says whether it was here."""
        if door not in self._doors:
            return False
        del self._doors[door]
        return True

    def _oldest_of_most(self) -> AnsweringDoor:
        by_host = collections.Counter(door.host for door in self._doors)
        ((host, _),) = by_host.most_common(1)
        return next(door for door in self._doors if door.host == host)

    def close(self) -> None:
        """Drop all."""
        for door in list(self._doors):
            door.drop("came while we close")


def _nonce() -> bytes:
    return secrets.token_bytes(proof.NONCE_BYTES)
