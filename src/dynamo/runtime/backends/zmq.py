"""The event plane across processes, the default: publishers bind, listeners connect, discovery tells where.

A process that publishes binds one PUB socket and writes its address under each topic that it advertises:
`v1/event_channels/{topic}/{instance id, hexadecimal}`. A listener watches that prefix and connects its one SUB socket
to every address there. `zmq_receiver.message_of` tells the form of a message.

**What may be missed.** A connection takes a moment after discovery told of it, and what is published before reaches no
listener: the first number that a listener sees need not be 0. A listener that falls behind misses messages once
`zmq_receiver.HIGH_WATER` of them wait. Numbers show both.

**A peer that is gone without a word** (a cut of the network, a NAT that forgot the flow) is noticed by heartbeats of
both sockets, and the listener connects again. A listener that expected events of a publisher calls `reconnect`.

**One thread receives** for all topics (`zmq_receiver.EventReceiver`). The PUB socket belongs to the loop's thread.

**With a cluster token** all is authenticated and encrypted by ZeroMQ's CURVE. All publishers have one key pair, made of
the token. Its public half is never sent either, and a listener without it cannot say the first word of CURVE's
handshake, so a listener proves that it knows the token, too. Listeners have temporary keys. While the token changes,
a publisher's record names the key that it uses (by a name derived from it), and listeners have the keys of both tokens.
A publisher listens anew with a changed token; what is lost meanwhile is found by its numbers.
"""

import asyncio
import collections
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from dynamo.base import addresses, errors, membership, tasks
from dynamo.protocols import instances, wire
from dynamo.runtime import authentication, listening
from dynamo.runtime.backends import zmq_receiver
from dynamo.runtime.discovery import Discovery, Put
from dynamo.runtime.events import Event, Listener, PublishedTopics

_log = logging.getLogger(__name__)
_REBIND_S = 0.05
_NOWHERE = (None, "")
_NAME_S = 2.0  # for a refused listener to try again and be named; one that does not is logged without its address
_SUBSCRIPTION_LIMIT = 4096  # bytes that a listener may send at once
_ANY_ADDRESS = listening.ListenAddress(setting="DYN_EVENT_")


def check_address(
    listen_address: listening.ListenAddress, credentials: membership.Credentials
) -> listening.ListenAddress:
    """Return the address in plain form.

    Raises ConfigError for one that peers cannot connect to, or that is open to the whole network.
    """
    plain = listen_address.checked()
    for host in plain.hosts:
        membership.check_token_address(host, "the event plane over ZeroMQ", credentials)
    return plain


class ZmqEventPlane:
    """An `EventPlane` over ZeroMQ: one socket publishes, another hears all publishers that discovery names."""

    def __init__(
        self,
        discovery: Discovery,
        instance_id: int,
        *,
        listen_address: listening.ListenAddress = _ANY_ADDRESS,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
    ) -> None:
        """Raises ConfigError as `check_address` does."""
        self._discovery = discovery
        self._instance_id = instance_id
        self._address = check_address(listen_address, credentials)
        self._authenticator = authentication.ConnectionAuthenticator(
            credentials, authentication.EVENT_PLANE
        )
        self._secrets = self._authenticator.curve_secrets
        self._context = zmq.Context()
        self._publisher: _Publisher | None = None
        self._topics: set[str] = set()  # advertised
        self._receiver: zmq_receiver.EventReceiver | None = None
        self._audience_by_topic: dict[str, _Audience] = {}
        self._tasks = tasks.Tasks()
        self._is_open = True
        self._is_following = False  # the tokens
        self._log = authentication.RefusalLog(_log, time.monotonic)

    async def advertise(self, topic: str) -> None:
        self._listen().topics.add(topic)
        self._topics.add(topic)
        record = self._channel(topic)
        await self._discovery.put(record.key, msgspec.json.encode(record))

    async def listen(self) -> None:
        self._listen()

    def _listen(self) -> "_Publisher":
        if self._publisher is None:
            self._publisher = self._make_publisher(PublishedTopics())
            self._start_following()
        return self._publisher

    def _make_publisher(self, topics: PublishedTopics) -> "_Publisher":
        key = next(iter(self._secrets.items()), None)
        return _Publisher(self._context, self._instance_id, self._address, key, topics)

    def _channel(self, topic: str) -> instances.EventChannel:
        publisher = self._listen()
        transport = {"zmq": publisher.address}
        if publisher.key_name:
            transport["zmq-key"] = publisher.key_name
        return instances.EventChannel(
            topic=topic, instance_id=self._instance_id, transport=transport
        )

    def _start_following(self) -> None:
        """Follow the tokens, if they come from a file, from the first socket on."""
        if self._secrets and self._authenticator.has_files and not self._is_following:
            self._is_following = True
            self._tasks.start("follow the cluster token", self._follow_tokens())

    async def _follow_tokens(self) -> None:
        """Take the tokens as their file changes: for connections that begin, and for the publisher."""
        while True:
            await asyncio.sleep(membership.CHECK_S)
            self._take_secrets()
            publisher = self._publisher
            if publisher is not None and publisher.key_name != next(iter(self._secrets)):
                await self._replace_publisher(publisher)

    def _take_secrets(self) -> None:
        former, self._secrets = self._secrets, self._authenticator.curve_secrets
        if self._secrets != former and self._receiver is not None:
            self._receiver.set_secrets(self._secrets)

    async def _replace_publisher(self, former: "_Publisher") -> None:
        """Publish with the new token: at another port, or at the same one if the settings name only one."""
        publisher: _Publisher | None = None
        while publisher is None:
            try:
                publisher = self._make_publisher(former.topics)
            except errors.ConfigError:  # the port is free when the former socket has ended
                former.close()
                await asyncio.sleep(_REBIND_S)
        self._publisher = publisher
        try:
            for topic in list(self._topics):  # one that is new meanwhile has the new address
                await self._tell_channel(self._channel(topic))
        finally:  # the end of the context waits for each socket, in this thread
            former.close()

    async def _tell_channel(self, record: instances.EventChannel) -> None:
        """Put a record into discovery; again and again where that is refused, as by a disk that is full."""
        while True:
            try:
                await self._discovery.put(record.key, msgspec.json.encode(record))
            except errors.ConfigError as error:
                self._log.warning("", "%s is not published yet: %s", record.key, error)
                await asyncio.sleep(membership.CHECK_S)
                continue
            except errors.Unavailable as error:
                _log.warning("%s is published when discovery is back: %s", record.key, error)
            return

    def publish(self, topic: str, payload: bytes) -> None:
        if not self._is_open:
            return
        if self._publisher is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        self._publisher.publish(topic, payload)

    async def subscribe(self, topic: str, listener: Listener) -> "ZmqSubscription":
        if self._receiver is None:
            self._receiver = zmq_receiver.EventReceiver(self._context, self._deliver, self._secrets)
            self._start_following()
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
            await self._discovery.delete(*(self._channel(topic).key for topic in self._topics))
            self._publisher.close()
        self._context.term()

    async def _follow(
        self, topic: str, receiver: zmq_receiver.EventReceiver, addresses: dict[int, str]
    ) -> None:
        """Stay connected to all publishers of `topic`, and keep their addresses in `addresses` by instance."""
        try:
            async for change in self._discovery.watch(f"{instances.EVENT_CHANNELS}{topic}/"):
                try:
                    publisher = int(change.key.rpartition("/")[2], 16)
                except ValueError:
                    _log.warning("ignoring event channel %s: expected an instance id", change.key)
                    continue
                old_address = addresses.pop(publisher, None)
                address, key_name = _address(change, topic) if isinstance(change, Put) else _NOWHERE
                if address is not None:
                    addresses[publisher] = address
                    if key_name not in self._secrets:  # the files may have been read a moment ago
                        self._take_secrets()
                    receiver.connect(address, key_name)
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
    """One listener's subscription to a topic, of all its publishers that discovery names."""

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
        address: listening.ListenAddress,
        key: tuple[str, bytes] | None,
        topics: PublishedTopics,
    ) -> None:
        """`key` is the name and secret half of the key of CURVE."""
        self._id = instance_id
        self.topics = topics
        self.key_name = "" if key is None else key[0]
        self._socket = context.socket(zmq.PUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, zmq_receiver.HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, _SUBSCRIPTION_LIMIT)
        zmq_receiver.watch_peers(self._socket)
        if key is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, z85.encode(key[1]))
        self._refused = _RefusedListeners(self._socket, has_token=key is not None)
        try:
            family, number = addresses.resolve(address.host)  # ZeroMQ binds no names
            self._socket.set(zmq.IPV6, family == socket.AF_INET6)
            address.ports.bind(lambda port: self._bind(addresses.join(number, port)))
        except OSError as error:
            self.close()
            raise address.refusal(error) from error
        _, port = addresses.split(self._socket.get_string(zmq.LAST_ENDPOINT))
        self.address = f"tcp://{address.published(port)}"

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error

    def publish(self, topic: str, payload: bytes) -> None:
        if len(payload) > zmq_receiver.PAYLOAD_LIMIT:
            raise errors.LocalProtocolError(
                f"event on {topic!r} has {len(payload)} bytes, expected at most {zmq_receiver.PAYLOAD_LIMIT}"
            )
        number = self.topics.take_number(topic)
        if self._socket.closed:  # a listener finds the number missing
            return
        event = Event(topic=topic, publisher=self._id, number=number, payload=payload)
        # a PUB socket drops, it never refuses
        self._socket.send(zmq_receiver.message_of(event), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._socket.closed:
            self._refused.close()
            self._socket.close()


class _RefusedListeners:
    """The listeners that fail the handshake of a PUB socket, for the log. Only for the loop's thread.

    ZeroMQ names no peer in the event of a failure; it follows with the end of the peer's connection, by descriptor.
    A failed connection may be closed before its peer is looked up. Most listeners try again, and are named then; one
    that finds by itself that it has another mechanism does not.
    """

    def __init__(self, publisher: zmq.Socket[bytes], *, has_token: bool) -> None:
        self._publisher = publisher
        self._has_token = has_token
        self._monitor = publisher.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq_receiver.HANDSHAKE_FAILURES
        )
        self._log = authentication.RefusalLog(_log, time.monotonic)
        # read, but not handled yet
        self._events: collections.deque[Mapping[str, Any]] = collections.deque()
        self._host_by_descriptor: dict[int, str] = {}
        self._mismatch: str | None = None  # of the connection that ends next
        self._unnamed: asyncio.TimerHandle | None = None  # logs a failure whose peer is not known
        self._descriptor = int(self._monitor.get(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        self._read()  # ZeroMQ signals the descriptor only after a first read

    def close(self) -> None:
        if self._unnamed is not None:
            self._unnamed.cancel()
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._publisher.disable_monitor()
        self._monitor.close()

    def _read(self) -> None:
        """Handle all events: their descriptor signals new ones only."""
        self._take_events()
        while self._events:
            self._handle(self._events.popleft())
            self._take_events()

    def _take_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._events.append(
                    parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                )

    def _handle(self, event: Mapping[str, Any]) -> None:
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._host_by_descriptor.pop(descriptor, None)
            if host := self._find_host(descriptor):
                self._host_by_descriptor[descriptor] = host
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            host = self._host_by_descriptor.pop(descriptor, None)
            if self._mismatch is not None:
                self._report(host, self._mismatch)
            self._mismatch = None
        else:
            self._mismatch = self._describe_mismatch(event["value"])

    def _describe_mismatch(self, detail: int) -> str | None:
        """Return what is wrong with the token of a listener; None if it only left, as a probe of the port does."""
        if detail == zmq_receiver.SILENT:
            return None
        if self._has_token:
            return zmq_receiver.MISMATCH
        if detail == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "has a cluster token, and this process has none"
        return None

    def _find_host(self, descriptor: int) -> str | None:
        """Return the host of the peer, unless the connection has ended: then the descriptor may be another's."""
        host: str | None = None
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as peer:
            host = str(peer.getpeername()[0])
        self._take_events()
        has_ended = any(
            (later["event"], later["value"]) == (zmq.EVENT_DISCONNECTED, descriptor)
            for later in self._events
        )
        return None if has_ended else host

    def _report(self, host: str | None, mismatch: str) -> None:
        if host is not None:
            if self._unnamed is not None:
                self._unnamed.cancel()
                self._unnamed = None
            self._tell_refusal(host, mismatch)
        elif self._unnamed is None:
            self._unnamed = asyncio.get_running_loop().call_later(
                _NAME_S, self._tell_unnamed, mismatch
            )

    def _tell_unnamed(self, mismatch: str) -> None:
        self._unnamed = None
        self._tell_refusal("an address that could not be read", mismatch)

    def _tell_refusal(self, where: str, mismatch: str) -> None:
        text = "event plane: refused a listener at %s: it %s; %s"
        self._log.warning(where, text, where, mismatch, zmq_receiver.TOKEN_ADVICE)


def _address(channel: Put, topic: str) -> tuple[str | None, str]:
    """Return the address of a publisher and the name of its key; no address, with a line, if its record has none."""
    try:
        record = msgspec.json.decode(channel.value, type=instances.EventChannel)
    except wire.DECODE_ERRORS as error:
        _log.warning("ignoring event channel %s: %s", channel.key, error)
        return _NOWHERE
    if record.topic != topic:  # a longer topic that begins like this one
        return _NOWHERE
    if "zmq" not in record.transport:
        _log.warning("ignoring event channel %s: not by zmq: %s", channel.key, record.transport)
    return record.transport.get("zmq"), record.transport.get("zmq-key", "")
