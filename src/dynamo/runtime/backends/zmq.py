"""The event plane across processes, the default: publishers bind, listeners connect, discovery tells where.

A process that publishes binds one PUB socket and writes its address under each topic that it advertises:
`v1/event_channels/{topic}/{instance id, hexadecimal}`. A listener watches that prefix and connects its one SUB socket
to every address there. A message is `[topic, number (u64, big-endian), publisher id (same), payload]`.

**What may be missed.** A connection takes a moment after discovery told of it, and what is published before reaches no
listener: the first number that a listener sees need not be 0. A listener that falls behind misses messages once
`HIGH_WATER` of them wait. Numbers show both.

**One thread receives** for all topics (`zmq_receiver`). The PUB socket belongs to the loop's thread.

**With a cluster token** all is authenticated and encrypted by ZeroMQ's CURVE. All publishers have one key pair, made of
the token. Its public half is never sent either, and a listener without it cannot say the first word of CURVE's
handshake, so a listener proves that it knows the token, too. Listeners have temporary keys.
"""

import asyncio
import collections
import logging

import msgspec
import zmq
from zmq.utils import z85

from dynamo.base import errors, membership, tasks
from dynamo.protocols import instances
from dynamo.runtime import authentication
from dynamo.runtime.backends.zmq_receiver import (
    HANDSHAKE_MS,
    HIGH_WATER,
    PAYLOAD_LIMIT,
    U64,
    EventReceiver,
)
from dynamo.runtime.discovery import Discovery, Put
from dynamo.runtime.events import Event, Listener

_SUBSCRIPTION_LIMIT = 4096  # bytes that a listener may send at once
_WILDCARDS = ("", "*", "0.0.0.0", "::")

log = logging.getLogger(__name__)


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
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
    ) -> None:
        """Raises ConfigError as `check_host` does."""
        check_host(host, credentials)
        self._discovery = discovery
        self._instance_id = instance_id
        self._host = host
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
            self._publisher = _Publisher(self._context, self._instance_id, self._host, self._secret)
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
            follow = self._tasks.start(f"follow {topic}", self._follow(topic, self._receiver))
            audience = self._audience_by_topic[topic] = _Audience(follow)
        subscription = ZmqSubscription(self, topic, listener)
        audience.subscriptions.append(subscription)
        return subscription

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

    async def _follow(self, topic: str, receiver: "EventReceiver") -> None:
        """Stay connected to all publishers of `topic`."""
        addresses: dict[str, str] = {}
        try:
            async for change in self._discovery.watch(f"{instances.EVENT_CHANNELS}{topic}/"):
                old_address = addresses.pop(change.key, None)
                address = _address(change, topic) if isinstance(change, Put) else None
                if address is not None:
                    addresses[change.key] = address
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
            by_topic[event.topic].append(event)
        loop = asyncio.get_running_loop()
        for topic, events in by_topic.items():
            audience = self._audience_by_topic.get(topic)
            for subscription in audience.subscriptions if audience else ():
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

    def __init__(self, follow: asyncio.Task[None]) -> None:
        self.follow = follow
        self.subscriptions: list[ZmqSubscription] = []


class _Publisher:
    """The PUB socket. Only for the loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        instance_id: int,
        host: str,
        secret: bytes | None,
    ) -> None:
        self._id = U64.pack(instance_id)
        self._next_number_by_topic: dict[str, int] = {}
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, _SUBSCRIPTION_LIMIT)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if secret is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, secret)
        try:
            self._socket.bind(f"tcp://{host}:0")
        except zmq.ZMQError as error:
            self._socket.close()
            raise errors.ConfigError(
                f"event plane cannot listen on {host!r}: {error}; expected an address of this host"
            ) from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def add(self, topic: str) -> None:
        self._next_number_by_topic.setdefault(topic, 0)

    def publish(self, topic: str, payload: bytes) -> None:
        number = self._next_number_by_topic.get(topic)
        if number is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        if len(payload) > PAYLOAD_LIMIT:
            raise errors.LocalProtocolError(
                f"event on {topic!r} has {len(payload)} bytes, expected at most {PAYLOAD_LIMIT}"
            )
        self._next_number_by_topic[topic] = number + 1
        frames = (topic.encode(), U64.pack(number), self._id, payload)
        self._socket.send_multipart(frames, zmq.NOBLOCK)  # a PUB socket drops, it never refuses

    def close(self) -> None:
        self._socket.close()


def _address(channel: Put, topic: str) -> str | None:
    """Return the address of a publisher; None, with a line in the log, if its record has none."""
    try:
        record = msgspec.json.decode(channel.value, type=instances.EventChannel)
    except msgspec.DecodeError as error:
        log.warning("ignoring event channel %s: %s", channel.key, error)
        return None
    if record.topic != topic:  # a longer topic that begins like this one
        return None
    if "zmq" not in record.transport:
        log.warning("ignoring event channel %s: not by zmq: %s", channel.key, record.transport)
    return record.transport.get("zmq")
