"""The request plane and the event plane over NATS.

The request plane: the same connections that TCP has, of numbered messages. An address is a subject.

Each process subscribes to one subject, its *inbox*: `dynamo.link.{namespace}.{number}.*`. The last token names a
connection; the client draws it (64 random bits, so that a third party cannot write into it), and its own inbox with the
same token is the reply subject of each message. All that is written within one turn of the event loop is one message.

NATS does not report the loss of a peer, so it is noticed in these ways:

- a message to a subject without a subscriber is answered by the server (*no responders*): a connection to a dead
  process breaks with the next message. So a connection that becomes quiet is probed by its client, each `PROBE_S` for a
  second; where streams are open, the answers to heartbeats keep that up, and where none are, it ends;
- a message to an unknown connection is answered by `close`; a missing number breaks the connection;
- the loss of the server breaks all connections, at both sides at once. When it is back, not all processes have found it
  at once: for `RETURN_S` a peer without a subscription is probed again, before a connection to it is begun;
- a peer whose host is cut off keeps its subscription for a while, and messages to it are lost. So a connection is begun
  when the peer has answered a probe, and a probe that is not answered within `ANSWER_S` is followed by another;
- the rest is `frame_connection`'s limit of silence.

NATS keeps the order of a subject, but loses what a server had in memory when it died and what a slow subscriber did
not take. A stream of bytes with a hole would be decoded into wrong tokens. So each side numbers its messages from 0:

    kind (u8: 0 open, 1 bytes, 2 close, 3 probe) · number (u64, big-endian) · bytes

A probe is empty; the server answers it where the subject has no subscriber. Its number is that of the message which its
sender expects next, or 0. It is also sent behind each message of `LONG_BYTES` and more, so that the sender of a long
request sees it arrive over a slow wire: long data are sent in parts, because of a message NATS delivers all or nothing.

The event plane: a topic is a subject, and the server knows the listeners. Nothing is in discovery.

    topic     {namespace}/{component}/{event}
    subject   namespace.{namespace}.component.{component}.{event}
    message   publisher id (u64, big-endian) · number (the same) · payload

Listeners miss events that are published while there is no server, that they are too slow for, and that the server held
when it died. Numbers show all three: they go on while no listener is connected.
"""

import asyncio
import collections
import functools
import logging
import re
import secrets
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from dynamo.base import clock, errors
from dynamo.observability import logs
from dynamo.runtime import authentication
from dynamo.runtime.backends import frame_connection, multiplex
from dynamo.runtime.backends.nats import connection
from dynamo.runtime.events import BatchedSubscription, Event, Listener, PublishedTopics

HEADER = struct.Struct(">BQ")


class MessageKind(IntEnum):
    """The meaning of a message to its connection."""

    OPEN = 0
    BYTES = 1
    CLOSE = 2
    PROBE = 3


PROBE = HEADER.pack(MessageKind.PROBE, 0)
PART_BYTES = 2**16
LONG_BYTES = PART_BYTES // 2  # of a message whose arrival is reported
_MOST_LONG = 4096  # messages whose arrival is awaited: more than a connection may have waiting


class EnvelopeWriter:
    """Numbers the messages of one side from 0, so that the other side notices what NATS has lost."""

    def __init__(self) -> None:
        self._next = 0

    def wrap(self, kind: MessageKind, data: bytes | memoryview = b"") -> bytes:
        """Return one message with the next number."""
        number, self._next = self._next, self._next + 1
        return HEADER.pack(kind, number) + data

    def split(self, data: bytes, max_message_bytes: int) -> Iterator[bytes]:
        """Yield the data as messages of at most `max_message_bytes`, long data in parts."""
        room = min(PART_BYTES, max_message_bytes) - HEADER.size
        if len(data) <= room:
            yield self.wrap(MessageKind.BYTES, data)
            return
        view = memoryview(data)
        for start in range(0, len(data), room):
            yield self.wrap(MessageKind.BYTES, view[start : start + room])


class EnvelopeReader:
    """Checks that no message of the other side is missing. After an error the connection has to end."""

    def __init__(self) -> None:
        self._next = 0

    @property
    def arrival(self) -> bytes:
        """Return the message that reports which messages have arrived."""
        return HEADER.pack(MessageKind.PROBE, self._next)

    def unwrap(self, message: bytes) -> tuple[MessageKind, bytes]:
        """Return kind and data. Raises RemoteProtocolError if it is not the next message of this connection."""
        kind, number = read_header(message)
        if kind is MessageKind.PROBE:
            return kind, b""
        if number != self._next:
            raise errors.RemoteProtocolError(
                f"NATS lost a message: expected number {self._next}, got {number}"
            )
        self._next += 1
        return kind, message[HEADER.size :]


def read_header(message: bytes) -> tuple[MessageKind, int]:
    """Return kind and number of a message. Raises RemoteProtocolError."""
    try:
        kind, number = HEADER.unpack_from(message)
        return MessageKind(kind), number
    except (struct.error, ValueError) as error:
        raise errors.RemoteProtocolError(f"expected a message of a link: {error}") from error


class ArrivalCount:
    """The bytes that one side has sent and that have not arrived, as far as long messages tell."""

    def __init__(self) -> None:
        self._num_sent = self._num_arrived = 0
        # of each long message its number, and the bytes that were sent up to its end
        self._long: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MOST_LONG)

    @property
    def num_waiting(self) -> int:
        """Return the bytes that have not arrived; 0 while no long message is on its way."""
        return self._num_sent - self._num_arrived if self._long else 0

    def note_sent(self, message: bytes) -> None:
        """Count a message that is sent now."""
        num_bytes = len(message) - HEADER.size
        if num_bytes >= LONG_BYTES:
            if not self._long:
                self._num_arrived = self._num_sent
            self._long.append((read_header(message)[1], self._num_sent + num_bytes))
        self._num_sent += num_bytes

    def note_arrived(self, next_number: int) -> None:
        """Take note that all messages before this number have arrived."""
        while self._long and self._long[0][0] < next_number:
            self._num_arrived = self._long.popleft()[1]


PROBE_S = 0.1
AWAY_S = 10.0  # seconds for which new connections wait for a server; then each fails at once
RETURN_S = 2.0  # some attempts to connect, on a busy machine
ANSWER_S = 0.3  # for which the answer to a probe is waited for; a late one is no loss
_PROBES = 10  # after the last message of the peer
_INBOX = re.compile(r"dynamo\.link\.[A-Za-z0-9_-]+\.[0-9a-f]{1,16}")
_LINK = re.compile(_INBOX.pattern + r"\.[0-9a-f]{16}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")


class NatsTransport(asyncio.Transport):
    """One side of a connection: its bytes are messages to the subject of the other side."""

    def __init__(
        self, network: "NatsNetwork", token: str, peer: str, protocol: asyncio.Protocol
    ) -> None:
        super().__init__()
        self._network = network
        self._token = token
        self.peer = peer  # the subject of the other side
        self._protocol = protocol
        self._writer = EnvelopeWriter()
        self._reader = EnvelopeReader()
        self._arrivals = ArrivalCount()
        self._quiet_ticks = 0  # since the last message of the peer
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            limit = self._network.connection.max_message_bytes
            for message in self._writer.split(bytes(data), limit):
                self._arrivals.note_sent(message)
                self._network.send(self._token, self.peer, message)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the bytes that the peer has not got yet as `waiting_bytes`, or the default."""
        return self._arrivals.num_waiting if name == "waiting_bytes" else default

    def get_write_buffer_size(self) -> int:
        return self._network.connection.backlog_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def open(self) -> None:
        """Send the client's first message."""
        self._network.send(self._token, self.peer, self._writer.wrap(MessageKind.OPEN))

    def close(self) -> None:
        if not self._is_closing:
            self._network.send(self._token, self.peer, self._writer.wrap(MessageKind.CLOSE))
            self.end(None)

    def abort(self) -> None:
        self.close()

    def probe(self) -> None:
        """Probe the peer if it has become quiet: the server answers if it is not subscribed any more."""
        self._quiet_ticks += 1
        if 0 < self._quiet_ticks <= _PROBES:
            self._network.send(self._token, self.peer, PROBE)

    def receive(self, message: bytes) -> None:
        """Take a message for this connection."""
        self._quiet_ticks = -1  # the present tick does not count
        try:
            kind, data = self._reader.unwrap(message)
        except errors.RemoteProtocolError as error:
            self._network.send(self._token, self.peer, self._writer.wrap(MessageKind.CLOSE))
            self.end(ConnectionError(str(error)))
            return
        if kind is MessageKind.BYTES:
            if len(data) >= LONG_BYTES:
                self._network.send(self._token, self.peer, self._reader.arrival)
            self._protocol.data_received(data)
        elif kind is MessageKind.PROBE:
            self._arrivals.note_arrived(read_header(message)[1])
        elif kind is MessageKind.CLOSE:
            self.end(None)

    def end(self, reason: Exception | None) -> None:
        """End the connection; the protocol is called in a later turn of the event loop."""
        if not self._is_closing:
            self._is_closing = True
            self._network.forget(self._token)
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, reason)


class NatsNetwork:
    """One process's inbox, and its connections by token."""

    name = "nats"

    def __init__(self, to_nats: connection.NatsConnection, *, namespace: str, number: int) -> None:
        self.connection = to_nats
        self._inbox = f"dynamo.link.{_UNUSUAL.sub('_', namespace) or '_'}.{number:x}"
        self._subscription: connection.SubjectSubscription | None = None
        self._subscribing = asyncio.Lock()
        self._make_protocol: authentication.MakeProtocol | None = None
        self._transports: dict[str, NatsTransport] = {}
        self._client_side: set[NatsTransport] = set()  # those that this process began
        self._probing: clock.Timer | None = None
        self._presence_checks: dict[str, asyncio.Future[bool]] = {}  # by token
        to_nats.on_lost(self._break_all)

    async def listen(self, make_protocol: authentication.MakeProtocol) -> multiplex.NetworkListener:
        await self._subscribe_inbox()
        self._make_protocol = make_protocol
        return multiplex.NetworkListener(address=self._inbox, close=self._refuse)

    async def connect(self, address: str, make_protocol: authentication.MakeProtocol) -> None:
        if not _INBOX.fullmatch(address):
            raise errors.WorkerLost(f"{address!r} is no address: expected the subject of a process")
        try:
            await self.connection.wait_connected(AWAY_S)
            await self._subscribe_inbox()
        except errors.Unavailable as error:
            raise errors.WorkerLost(f"cannot reach the worker at {address}: {error}") from error
        await self._await_peer(address)
        token = secrets.token_hex(8)
        self._establish(token, f"{address}.{token}", make_protocol, is_client=True)

    async def close(self) -> None:
        """Unsubscribe from the inbox."""
        if self._probing is not None:
            self._probing.cancel()
        if self._subscription is not None:
            await self._subscription.close()

    def send(self, token: str, peer: str, message: bytes) -> None:
        """Send a message to the other side of a connection."""
        self.connection.publish(peer, message, f"{self._inbox}.{token}")

    def forget(self, token: str) -> None:
        """Remove a connection that is over."""
        transport = self._transports.pop(token, None)
        if transport is not None:
            self._client_side.discard(transport)

    async def _subscribe_inbox(self) -> None:
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self.connection.subscribe(
                    f"{self._inbox}.*", self._handle_message
                )

    async def _await_peer(self, address: str) -> None:
        """Return when the peer can be reached, or when it certainly cannot. The caller bounds the time."""
        while True:
            try:
                async with self.connection.clock.timeout(ANSWER_S):
                    is_present = await self._is_present(address)
            except TimeoutError:
                continue
            if is_present or not self.connection.is_back_since(RETURN_S):
                return
            await self.connection.clock.sleep(PROBE_S)

    async def _is_present(self, address: str) -> bool:
        """Return True if a process is subscribed to this inbox. The caller bounds the time."""
        token = secrets.token_hex(8)
        check: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._presence_checks[token] = check
        self.send(token, f"{address}.{token}", PROBE)
        try:
            return await check
        finally:
            del self._presence_checks[token]

    def _resolve_check(self, token: str, *, is_present: bool) -> bool:
        """Complete a presence check; return False if the token belongs to none."""
        check = self._presence_checks.get(token)
        if check is not None and not check.done():
            check.set_result(is_present)
        return check is not None

    def _handle_message(self, subject: str, reply: str, message: bytes) -> None:
        token = subject.rpartition(".")[2]
        transport = self._transports.get(token)
        if transport is None:
            self._handle_unknown(token, reply, message)
        elif message:
            transport.receive(message)
        else:
            transport.end(ConnectionResetError("its subject has no subscriber any more"))

    def _handle_unknown(self, token: str, reply: str, message: bytes) -> None:
        """Take a message of a new connection, of one that is over on this side only, or of a faulty peer."""
        is_check = self._resolve_check(token, is_present=bool(message))
        if is_check or not _LINK.fullmatch(reply) or not reply.endswith(token):
            return
        try:
            kind, number = read_header(message)
        except errors.RemoteProtocolError:
            return
        if kind is MessageKind.OPEN and number == 0 and self._make_protocol is not None:
            self._establish(token, reply, self._make_protocol, is_client=False).receive(message)
        elif kind is not MessageKind.CLOSE:
            self.send(token, reply, EnvelopeWriter().wrap(MessageKind.CLOSE))

    def _establish(
        self, token: str, peer: str, make_protocol: authentication.MakeProtocol, *, is_client: bool
    ) -> NatsTransport:
        protocol = make_protocol()
        transport = self._transports[token] = NatsTransport(self, token, peer, protocol)
        if is_client:
            self._client_side.add(transport)
            transport.open()
            self._probe_later()
        else:  # clients that died without a word are found out: nothing else ends their connections
            for name, entry in self._transports.items():
                self.send(name, entry.peer, PROBE)
        protocol.connection_made(transport)
        return transport

    def _probe_all(self) -> None:
        """Probe the client side's connections, for as long as there are any."""
        self._probing = None
        for transport in self._client_side:
            transport.probe()
        self._probe_later()

    def _probe_later(self) -> None:
        if self._client_side and self._probing is None:
            self._probing = self.connection.clock.call_later(PROBE_S, self._probe_all)

    def _refuse(self) -> None:
        self._make_protocol = None

    def _break_all(self, reason: str) -> None:
        for transport in list(self._transports.values()):
            transport.end(ConnectionError(reason))
        for token in self._presence_checks:
            self._resolve_check(token, is_present=False)


class NatsRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of a process that reaches others through NATS."""

    def __init__(
        self,
        network: NatsNetwork,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        *,
        item_type: Any = Any,
        instance_id: int = 0,
    ) -> None:
        super().__init__(
            network,
            limits,
            item_type=item_type,
            time=network.connection.clock,
            instance_id=instance_id,
        )
        self._inbox = network

    @property
    def is_away(self) -> bool:
        return not self._inbox.connection.is_connected

    async def close(self) -> None:
        await super().close()
        await self._inbox.close()


log = logging.getLogger(__name__)
_HEADER = struct.Struct(">QQ")
BATCH_LIMIT = 10_000  # events of one listener within one turn of the event loop
_TOPIC = re.compile(r"[^\s*>/]+/[^\s*>/]+/[^\s*>/]+")


class NatsEventPlane:
    """An `EventPlane` over subjects of NATS. Events of a time without a server are lost."""

    def __init__(self, to_nats: connection.NatsConnection, instance_id: int) -> None:
        self._nats = to_nats
        self._instance_id = instance_id
        self._log = logs.PeerLog(log, to_nats.clock.now)
        self._topics = PublishedTopics()
        self._subscriptions: set[BatchedSubscription] = set()
        self._is_open = True

    async def advertise(self, topic: str) -> None:
        subject(topic)
        self._topics.add(topic)

    async def listen(self) -> None:
        """Do nothing: this plane has no port."""

    def publish(self, topic: str, payload: bytes) -> None:
        if not self._is_open:
            return
        limit = self._nats.max_message_bytes - _HEADER.size
        if len(payload) > limit:
            raise errors.LocalProtocolError(
                f"event on {topic!r} has {len(payload)} bytes, expected at most {limit} (the server's max_payload)"
            )
        header = _HEADER.pack(self._instance_id, self._topics.take_number(topic))
        self._nats.publish(subject(topic), header + payload)

    def reconnect(self, topic: str, publisher: int) -> None:
        """Do nothing: the one connection, to the server, is watched by `connection`."""

    async def subscribe(self, topic: str, listener: Listener) -> BatchedSubscription:
        subscription = BatchedSubscription(topic, listener, max_events=BATCH_LIMIT)
        self._subscriptions.add(subscription)

        def receive(subject: str, reply: str, message: bytes) -> None:
            if len(message) < _HEADER.size:
                self._log.warning("", "dropped a malformed event message on %s", subject)
                return
            publisher, number = _HEADER.unpack_from(message)
            payload = message[_HEADER.size :]
            subscription.add_event(
                Event(topic=topic, publisher=publisher, number=number, payload=payload)
            )

        at_nats = await self._nats.subscribe(subject(topic), receive)

        async def unsubscribe() -> None:
            self._subscriptions.discard(subscription)
            await at_nats.close()

        subscription.on_close = unsubscribe
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in list(self._subscriptions):
            await subscription.close()


@functools.cache
def subject(topic: str) -> str:
    """Return the subject of a topic. Raises LocalProtocolError."""
    if not _TOPIC.fullmatch(topic):
        raise errors.LocalProtocolError(
            f"{topic!r} is no topic: expected {{namespace}}/{{component}}/{{event}}"
        )
    namespace, component, event = topic.split("/")
    return f"namespace.{namespace}.component.{component}.{event}"
