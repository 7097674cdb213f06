"""The request plane over NATS: the very ends that TCP has, on links of numbered messages. An address is a subject.

Each process hears one subject, its *inbox*: `dynamo.link.{namespace}.{number}.*`. The last token names a link;
the asker draws it (64 random bits, so that a third party cannot speak into it), and its own inbox with the same token
is the reply subject of each message. What the ends write within one turn of the event loop is one message.

How the loss of a peer is noticed, where NATS itself tells nothing:

- a message with a reply subject that nobody hears is answered by the server (*no responders*): a link to a dead process
  breaks with the next word. So a link that becomes quiet is probed by its asker, each `PROBE_S` for a second; where
  streams are open, the answers to heartbeats keep that up, and where none are, it ends;
- a message to a link that is not known is answered by `close`; a missing number breaks the link;
- a server that is gone breaks all links, at both sides at once. When it is back, not everybody has found it at once:
  for `RETURN_S` a peer that nobody hears is asked for again, before a link to it is begun;
- the rest is `link`'s limit of silence.
"""

import asyncio
import re
import secrets
from typing import Any

from dynamo.base import clock, errors
from dynamo.runtime import authentication
from dynamo.runtime.backends import frame_connection, multiplex
from dynamo.runtime.backends.nats import connection, envelope

PROBE_S = 0.1
AWAY_S = 10.0  # for which new links wait for a server; then each fails at once, not one worker after the other
RETURN_S = 2.0  # some attempts to connect, on a busy machine
_PROBES = 10  # after the last word of the peer
_INBOX = re.compile(r"dynamo\.link\.[A-Za-z0-9_-]+\.[0-9a-f]{1,16}")
_LINK = re.compile(_INBOX.pattern + r"\.[0-9a-f]{16}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")


class NatsTransport(asyncio.Transport):
    """One side of a link."""

    def __init__(
        self, network: "NatsNetwork", token: str, peer: str, protocol: asyncio.Protocol
    ) -> None:
        super().__init__()
        self._network = network
        self._token = token
        self._peer = peer  # the subject where the other side hears
        self._protocol = protocol
        self._writer = envelope.Writer()
        self._reader = envelope.Reader()
        self._quiet_ticks = 0  # since the peer was heard
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            limit = self._network.connection.max_message_bytes
            for message in self._writer.split(bytes(data), limit):
                self._network.say(self._token, self._peer, message)

    def get_write_buffer_size(self) -> int:
        return self._network.connection.backlog_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def open(self) -> None:
        """The asker's first message."""
        self._network.say(self._token, self._peer, self._writer.wrap(envelope.Kind.OPEN))

    def close(self) -> None:
        if not self._is_closing:
            self._network.say(self._token, self._peer, self._writer.wrap(envelope.Kind.CLOSE))
            self.end(None)

    def abort(self) -> None:
        self.close()

    def probe(self) -> None:
        """If the peer has become quiet, ask the server whether it still listens."""
        self._quiet_ticks += 1
        if 0 < self._quiet_ticks <= _PROBES:
            self._network.say(self._token, self._peer, envelope.PROBE)

    def hear(self, message: bytes) -> None:
        """What came for this link."""
        self._quiet_ticks = -1  # the tick under way says nothing
        try:
            kind, data = self._reader.unwrap(message)
        except errors.RemoteProtocolError as error:
            self._network.say(self._token, self._peer, self._writer.wrap(envelope.Kind.CLOSE))
            self.end(ConnectionError(str(error)))
            return
        if kind is envelope.Kind.BYTES:
            self._protocol.data_received(data)
        elif kind is envelope.Kind.CLOSE:
            self.end(None)

    def end(self, reason: Exception | None) -> None:
        """It is over; the protocol hears of it in a later turn of the event loop."""
        if not self._is_closing:
            self._is_closing = True
            self._network.forget(self._token)
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, reason)


class NatsNetwork:
    """One process's inbox, and the links that it hears there."""

    name = "nats"

    def __init__(self, to_nats: connection.NatsConnection, *, namespace: str, number: int) -> None:
        self.connection = to_nats
        self._inbox = f"dynamo.link.{_UNUSUAL.sub('_', namespace) or '_'}.{number:x}"
        self._subscription: connection.SubjectSubscription | None = None
        self._subscribing = asyncio.Lock()
        self._make_protocol: authentication.MakeProtocol | None = None
        self._links: dict[str, NatsTransport] = {}
        self._asked: set[NatsTransport] = set()  # those of them that we began
        self._probing: clock.Timer | None = None
        self._questions: dict[str, asyncio.Future[bool]] = {}  # is this peer there?
        to_nats.on_lost(self._break_all)

    async def listen(self, make_protocol: authentication.MakeProtocol) -> multiplex.NetworkListener:
        await self._hear_inbox()
        self._make_protocol = make_protocol
        return multiplex.NetworkListener(address=self._inbox, close=self._refuse)

    async def connect(self, address: str, make_protocol: authentication.MakeProtocol) -> None:
        if not _INBOX.fullmatch(address):
            raise errors.WorkerLost(f"{address!r} is no address: expected the subject of a process")
        try:
            await self.connection.wait_connected(AWAY_S)
            await self._hear_inbox()
        except errors.Unavailable as error:
            raise errors.WorkerLost(f"cannot reach the worker at {address}: {error}") from error
        while self.connection.is_back_since(RETURN_S):
            if await self._is_heard(address):
                break
            await self.connection.clock.sleep(PROBE_S)
        token = secrets.token_hex(8)
        self._establish(token, f"{address}.{token}", make_protocol, is_asker=True)

    async def close(self) -> None:
        """Hear nothing more."""
        if self._probing is not None:
            self._probing.cancel()
        if self._subscription is not None:
            await self._subscription.close()

    def say(self, token: str, peer: str, message: bytes) -> None:
        """To the other side of a link."""
        self.connection.publish(peer, message, f"{self._inbox}.{token}")

    def forget(self, token: str) -> None:
        """A link is over."""
        transport = self._links.pop(token, None)
        if transport is not None:
            self._asked.discard(transport)

    async def _hear_inbox(self) -> None:
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self.connection.subscribe(f"{self._inbox}.*", self._hear)

    async def _is_heard(self, address: str) -> bool:
        """Does anybody hear this inbox? The caller bounds the time."""
        token = secrets.token_hex(8)
        question: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._questions[token] = question
        self.say(token, f"{address}.{token}", envelope.PROBE)
        try:
            return await question
        finally:
            del self._questions[token]

    def _answer(self, token: str, *, is_heard: bool) -> bool:
        """Was it about a question of ours?"""
        question = self._questions.get(token)
        if question is not None and not question.done():
            question.set_result(is_heard)
        return question is not None

    def _hear(self, subject: str, reply: str, message: bytes) -> None:
        token = subject.rpartition(".")[2]
        known = self._links.get(token)
        if known is None:
            self._hear_stranger(token, reply, message)
        elif message:
            known.hear(message)
        else:
            known.end(ConnectionError("nobody hears its subject any more"))

    def _hear_stranger(self, token: str, reply: str, message: bytes) -> None:
        """A new link, or one that is over here and not yet there, or nonsense."""
        is_ours = self._answer(token, is_heard=bool(message))
        if is_ours or not _LINK.fullmatch(reply) or not reply.endswith(token):
            return
        try:
            kind, number = envelope.header(message)
        except errors.RemoteProtocolError:
            return
        if kind is envelope.Kind.OPEN and number == 0 and self._make_protocol is not None:
            self._establish(token, reply, self._make_protocol, is_asker=False).hear(message)
        elif kind is not envelope.Kind.CLOSE:
            self.say(token, reply, envelope.Writer().wrap(envelope.Kind.CLOSE))

    def _establish(
        self, token: str, peer: str, make_protocol: authentication.MakeProtocol, *, is_asker: bool
    ) -> NatsTransport:
        protocol = make_protocol()
        transport = self._links[token] = NatsTransport(self, token, peer, protocol)
        if is_asker:
            self._asked.add(transport)
            transport.open()
            self._probe_later()
        protocol.connection_made(transport)
        return transport

    def _probe_all(self) -> None:
        """For as long as there are links that we asked for."""
        self._probing = None
        for transport in self._asked:
            transport.probe()
        self._probe_later()

    def _probe_later(self) -> None:
        if self._asked and self._probing is None:
            self._probing = self.connection.clock.call_later(PROBE_S, self._probe_all)

    def _refuse(self) -> None:
        self._make_protocol = None

    def _break_all(self, reason: str) -> None:
        for transport in list(self._links.values()):
            transport.end(ConnectionError(reason))
        for token in self._questions:
            self._answer(token, is_heard=False)


class NatsRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of a process that reaches others through NATS."""

    def __init__(
        self,
        network: NatsNetwork,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        *,
        item_type: Any = Any,
    ) -> None:
        super().__init__(network, limits, item_type=item_type, time=network.connection.clock)
        self._inbox = network

    async def close(self) -> None:
        await super().close()
        await self._inbox.close()
