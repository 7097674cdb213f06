"""The event plane across processes, the default: publishers bind, listeners connect, discovery tells where.

A process that publishes binds one PUB socket and writes its address under each topic that it advertises:
`v1/event_channels/{topic}/{instance id, hexadecimal}`. A listener watches that prefix and connects its one SUB socket
to every address there. A message is `[topic, number (u64, big-endian), publisher id (same), payload]`.

**What may be missed.** A connection takes a moment after discovery told of it, and what is published before reaches no
listener: the first number that a listener sees need not be 0. A listener that falls behind misses messages once
`HIGH_WATER` of them wait. Numbers show both.

**A peer that is gone without a word** (a cut of the network, a NAT that forgot the flow) is noticed by heartbeats of
both sockets, and the listener connects again. A listener that expected events of a publisher calls `reconnect`.

**One thread receives** for all topics (`EventReceiver`). The PUB socket belongs to the loop's thread.

**With a cluster token** all is authenticated and encrypted by ZeroMQ's CURVE. All publishers have one key pair, made of
the token. Its public half is never sent either, and a listener without it cannot say the first word of CURVE's
handshake, so a listener proves that it knows the token, too. Listeners have temporary keys.
"""

import asyncio
import collections
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from dynamo.base import addresses, errors, membership, tasks
from dynamo.observability import logs
from dynamo.protocols import instances, wire
from dynamo.runtime import authentication
from dynamo.runtime.discovery import Discovery, Put
from dynamo.runtime.events import Event, Listener, PublishedTopics

_SUBSCRIPTION_LIMIT = 4096  # bytes that a listener may send at once
HANDSHAKE_MS = 5_000
# A peer that answers no heartbeat for three seconds is left, and so is an attempt to connect. The kernel's keepalive
# holds flows open in firewalls and NATs.
_PEER_WATCH = (
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    (zmq.HEARTBEAT_IVL, 1_000),
    (zmq.HEARTBEAT_TIMEOUT, 3_000),
    (zmq.CONNECT_TIMEOUT, 3_000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 1_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 15),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
_WILDCARDS = ("", "*", "0.0.0.0", "::")


def check_host(host: str, credentials: membership.Credentials) -> None:
    """Raise ConfigError for a host that peers cannot connect to, or that is open to the whole network."""
    if host in _WILDCARDS:
        raise errors.ConfigError(
            f"event plane host {host!r}: expected an address that other processes can connect to"
        )
    membership.check_token_address(host, "the event plane over ZeroMQ", credentials)


class ZmqEventPlane:
    """One process's publishing and listening."""

    def __init__(
        self,
        discovery: Discovery,
        instance_id: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
    ) -> None:
        """Raises ConfigError as `check_host` does."""
        host = addresses.plain_host(host, "DYN_TCP_RPC_HOST")
        check_host(host, credentials)
        self._discovery = discovery
        self._instance_id = instance_id
        self._address = host, port
        key = authentication.ConnectionAuthenticator(
            credentials, authentication.EVENT_PLANE
        ).curve_secret
        self._secret = None if key is None else z85.encode(key)
        self._context = zmq.Context()
        self._publisher: _Publisher | None = None
        self._channel_keys: set[str] = set()
        self._receiver: EventReceiver | None = None
        self._audience_by_topic: dict[str, _Audience] = {}
        self._tasks = tasks.Tasks()
        self._is_open = True

    async def advertise(self, topic: str) -> None:
        if self._publisher is None:
            self._publisher = _Publisher(
                self._context, self._instance_id, self._address, self._secret
            )
        self._publisher.add(topic)
        record = instances.EventChannel(
            topic=topic,
            instance_id=self._instance_id,
            transport={"zmq": self._publisher.address},
        )
        self._channel_keys.add(record.key)
        await self._discovery.put(record.key, msgspec.json.encode(record))

    def publish(self, topic: str, payload: bytes) -> None:
        if not self._is_open:
            return
        if self._publisher is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        self._publisher.publish(topic, payload)

    async def subscribe(self, topic: str, listener: Listener) -> "ZmqSubscription":
        if self._receiver is None:
            self._receiver = EventReceiver(self._context, self._deliver, self._secret)
        audience = self._audience_by_topic.get(topic)
        if audience is None:
            self._receiver.subscribe(topic)
            addresses: dict[int, str] = {}
            follow = self._tasks.start(
                f"follow {topic}", self._follow(topic, self._receiver, addresses)
            )
            audience = self._audience_by_topic[topic] = _Audience(follow, addresses)
        subscription = ZmqSubscription(self, topic, listener)
        audience.subscriptions.append(subscription)
        return subscription

    def reconnect(self, topic: str, publisher: int) -> None:
        audience = self._audience_by_topic.get(topic)
        address = audience.addresses.get(publisher) if audience is not None else None
        if address is not None and self._receiver is not None:
            self._receiver.reconnect(address)

    async def unsubscribe(self, subscription: "ZmqSubscription") -> None:
        """Remove a subscription; called by its `close`."""
        audience = self._audience_by_topic.get(subscription.topic)
        if audience is None or subscription not in audience.subscriptions or not self._receiver:
            return
        audience.subscriptions.remove(subscription)
        if not audience.subscriptions:
            del self._audience_by_topic[subscription.topic]
            self._receiver.unsubscribe(subscription.topic)
            audience.follow.cancel()
            await asyncio.wait((audience.follow,))

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._audience_by_topic.clear()
        await self._tasks.close()
        if self._receiver is not None:
            await self._receiver.close()
        if self._publisher is not None:
            for key in self._channel_keys:
                await self._discovery.delete(key)
            self._publisher.close()
        self._context.term()

    async def _follow(
        self, topic: str, receiver: "EventReceiver", addresses: dict[int, str]
    ) -> None:
        """Stay connected to all publishers of `topic`, whose addresses are kept in `addresses` by instance."""
        try:
            async for change in self._discovery.watch(f"{instances.EVENT_CHANNELS}{topic}/"):
                try:
                    publisher = int(change.key.rpartition("/")[2], 16)
                except ValueError:
                    log.warning("ignoring event channel %s: expected an instance id", change.key)
                    continue
                old_address = addresses.pop(publisher, None)
                address = _address(change, topic) if isinstance(change, Put) else None
                if address is not None:
                    addresses[publisher] = address
                    receiver.connect(address)
                if old_address is not None:
                    receiver.disconnect(old_address)
        finally:
            for address in addresses.values():
                receiver.disconnect(address)

    def _deliver(self, batch: list[Event]) -> None:
        """Call each listener on the loop in a callback of its own, so that one that fails harms no other."""
        by_topic = collections.defaultdict(list)
        for event in batch:
            audience = self._audience_by_topic.get(event.topic)
            if audience is not None and event.publisher in audience.addresses:
                by_topic[event.topic].append(event)  # else another instance has a former one's port
        loop = asyncio.get_running_loop()
        for topic, events in by_topic.items():
            for subscription in self._audience_by_topic[topic].subscriptions:
                loop.call_soon(subscription.deliver, events)
        if self._receiver is not None:
            loop.call_soon(self._receiver.resume)


class ZmqSubscription:
    """One listener's subscription to one topic."""

    def __init__(self, plane: ZmqEventPlane, topic: str, listener: Listener) -> None:
        self.topic = topic
        self._plane = plane
        self._listener = listener
        self._is_open = True

    def deliver(self, events: list[Event]) -> None:
        if self._is_open:
            self._listener(events)

    async def close(self) -> None:
        self._is_open = False
        await self._plane.unsubscribe(self)


class _Audience:
    """The subscriptions to a topic, and the task that keeps them connected to its publishers."""

    def __init__(self, follow: asyncio.Task[None], addresses: Mapping[int, str]) -> None:
        self.follow = follow
        self.addresses = addresses  # of the publishers, by instance
        self.subscriptions: list[ZmqSubscription] = []


class _Publisher:
    """The PUB socket. Only for the loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        instance_id: int,
        address: tuple[str, int],
        secret: bytes | None,
    ) -> None:
        host, port = address
        self._id = U64.pack(instance_id)
        self._topics = PublishedTopics()
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, _SUBSCRIPTION_LIMIT)
        _watch_peers(self._socket)
        if secret is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, secret)
        try:
            family, number = addresses.resolve(host)  # ZeroMQ binds no names
            self._socket.set(zmq.IPV6, family == socket.AF_INET6)
            self._socket.bind(f"tcp://{addresses.join(number, port)}")
        except (OSError, zmq.ZMQError) as error:
            self._socket.close()
            raise errors.ConfigError(
                f"event plane cannot listen on {addresses.join(host, port)}: {error}; expected an address of this host"
                " and a free port (DYN_TCP_RPC_HOST, DYN_EVENT_PORT)"
            ) from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def add(self, topic: str) -> None:
        self._topics.add(topic)

    def publish(self, topic: str, payload: bytes) -> None:
        if len(payload) > PAYLOAD_LIMIT:
            raise errors.LocalProtocolError(
                f"event on {topic!r} has {len(payload)} bytes, expected at most {PAYLOAD_LIMIT}"
            )
        number = self._topics.take_number(topic)
        frames = (topic.encode(), U64.pack(number), self._id, payload)
        self._socket.send_multipart(frames, zmq.NOBLOCK)  # a PUB socket drops, it never refuses

    def close(self) -> None:
        self._socket.close()


def _watch_peers(socket: zmq.Socket[bytes]) -> None:
    """Have ZeroMQ notice peers that are gone without a word (a cut, a NAT that forgot them), and connect again."""
    for option, value in _PEER_WATCH:
        socket.set(option, value)


def _address(channel: Put, topic: str) -> str | None:
    """Return the address of a publisher; None, with a line in the log, if its record has none."""
    try:
        record = msgspec.json.decode(channel.value, type=instances.EventChannel)
    except wire.DECODE_ERRORS as error:
        log.warning("ignoring event channel %s: %s", channel.key, error)
        return None
    if record.topic != topic:  # a longer topic that begins like this one
        return None
    if "zmq" not in record.transport:
        log.warning("ignoring event channel %s: not by zmq: %s", channel.key, record.transport)
    return record.transport.get("zmq")


HIGH_WATER = 10_000  # messages that wait for one slow listener before it misses some
PAYLOAD_LIMIT = 16 << 20
U64 = struct.Struct(">Q")
_FRAME_LIMIT = PAYLOAD_LIMIT + 1024
_BATCH_LIMIT = 1_000
HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

log = logging.getLogger(__name__)


class EventReceiver:
    """The SUB socket and the thread that reads it. The methods without a note are for the loop's thread.

    zmq's own asyncio sockets cost more per message than all else here. The thread hands over what has come as one
    batch, and takes the next only when the loop has taken that one. So a busy loop gets large batches, and what does
    not fit waits in zmq's bounded queues. The loop talks to it by a queue of commands and a socket to wake it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Callable[[list[Event]], None],
        secret: bytes | None,
    ) -> None:
        self._deliver = deliver
        self._log = logs.PeerLog(log, time.monotonic)
        self._loop = asyncio.get_running_loop()
        self._uses_by_address: collections.Counter[str] = collections.Counter()
        self._commands: collections.deque[Callable[[], object]] = collections.deque()
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind(f"inproc://wake-{id(self)}")
        self._woken = context.socket(zmq.PAIR)
        self._woken.connect(f"inproc://wake-{id(self)}")
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, _FRAME_LIMIT)
        _watch_peers(self._socket)
        self._failures: zmq.Socket[bytes] | None = None  # of handshakes
        if secret is not None:
            self._encrypt(secret)
        self._topic_by_name: dict[bytes, str] = {}
        self._refused: set[str] = set()  # publishers that failed the handshake
        self._early: collections.deque[list[bytes]] = collections.deque()  # see `_leave`
        self._is_waiting = False  # for `resume`
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="event receiver", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str) -> None:
        self._do(lambda: self._hear(topic))

    def unsubscribe(self, topic: str) -> None:
        self._do(lambda: self._ignore(topic))

    def connect(self, address: str) -> None:
        self._uses_by_address[address] += 1
        if self._uses_by_address[address] == 1:
            self._do(lambda: self._connect(address))

    def disconnect(self, address: str) -> None:
        self._uses_by_address[address] -= 1
        if not self._uses_by_address[address]:
            del self._uses_by_address[address]
            self._do(lambda: self._leave(address))

    def reconnect(self, address: str) -> None:
        """Connect anew to an address that is in use."""
        if address in self._uses_by_address:
            self._do(lambda: self._leave(address))
            self._do(lambda: self._connect(address))

    def _connect(self, address: str) -> None:
        self._socket.set(zmq.IPV6, "[" in address)
        self._socket.connect(address)

    def _encrypt(self, secret: bytes) -> None:
        public, own_secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(secret))
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, own_secret)
        self._failures = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)

    def resume(self) -> None:
        """The batch has been taken; bring the next."""
        self._do(self._resume)

    async def close(self) -> None:
        self._do(self._end)
        await asyncio.to_thread(self._thread.join)
        self._wake.close()

    def _do(self, command: Callable[[], object]) -> None:
        """Have the thread do it."""
        if self._is_running:
            self._commands.append(command)
            with contextlib.suppress(zmq.Again):  # so many wakes wait that one more is not needed
                self._wake.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        """The thread. What follows is called by it only."""
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        if self._failures is not None:
            self._poller.register(self._failures, zmq.POLLIN)
        while self._is_running:
            ready = dict(self._poller.poll())
            if self._woken in ready:
                self._obey()
                if self._early and not self._is_waiting:
                    self._hand_over()
            elif self._socket in ready:
                self._hand_over()
            elif self._failures is not None:
                self._tell_failure(self._failures)
        self._woken.close()
        if self._failures is not None:
            self._socket.disable_monitor()
            self._failures.close()
        self._socket.close()

    def _obey(self) -> None:
        self._woken.recv()
        while self._commands:
            try:
                self._commands.popleft()()
            except zmq.ZMQError as error:
                log.warning("event plane: %s", error)

    def _tell_failure(self, failures: zmq.Socket[bytes]) -> None:
        """Once for each publisher: zmq tries again for as long as we listen."""
        address = parse_monitor_message(failures.recv_multipart())["endpoint"].decode()
        if address not in self._refused:
            self._refused.add(address)
            log.warning(
                "event plane: the publisher at %s has another cluster token, or none; give every process the same"
                " (--cluster-token-file)",
                address,
            )

    def _hand_over(self) -> None:
        """Bring what has come to the loop, and wait for `resume` before bringing more."""
        batch: list[Event] = []
        num_malformed = 0
        for _ in range(_BATCH_LIMIT):
            try:
                frames = self._next()
            except zmq.Again:
                break
            if len(frames) != 4 or not len(frames[1]) == len(frames[2]) == U64.size:
                num_malformed += 1
            elif frames[0] in self._topic_by_name:  # zmq also lets through what only begins like it
                batch.append(self._event(frames))
        if num_malformed:
            self._log.warning("", "dropped %d malformed event messages", num_malformed)
        if batch:
            self._is_waiting = True
            self._poller.modify(self._socket, 0)
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _event(self, frames: list[bytes]) -> Event:
        name, number, publisher, payload = frames
        return Event(
            topic=self._topic_by_name[name],
            publisher=U64.unpack(publisher)[0],
            number=U64.unpack(number)[0],
            payload=payload,
        )

    def _hear(self, topic: str) -> None:
        self._topic_by_name[topic.encode()] = topic
        self._socket.subscribe(topic)

    def _ignore(self, topic: str) -> None:
        del self._topic_by_name[topic.encode()]
        self._socket.unsubscribe(topic)

    def _next(self) -> list[bytes]:
        """A message. Raises zmq.Again."""
        return self._early.popleft() if self._early else self._socket.recv_multipart(zmq.NOBLOCK)

    def _resume(self) -> None:
        self._is_waiting = False
        self._poller.modify(self._socket, zmq.POLLIN)

    def _leave(self, address: str) -> None:
        """Polling has begun to read a message: if its publisher went before the rest, libzmq would abort (#2163)."""
        self._refused.discard(address)
        with contextlib.suppress(zmq.Again):
            self._early.append(self._socket.recv_multipart(zmq.NOBLOCK))
        self._socket.disconnect(address)

    def _end(self) -> None:
        self._is_running = False
