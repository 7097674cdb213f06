"""The event plane over NATS: a topic is a subject, and the server knows the listeners. Nothing is in discovery.

    topic     {namespace}/{component}/{event}
    subject   namespace.{namespace}.component.{component}.{event}
    message   publisher id (u64, big-endian) · number (the same) · payload

Listeners miss events that are published while there is no server, that they are too slow for, and that the server held
when it died. Numbers show all three: they go on while no listener is connected.
"""

import asyncio
import logging
import re
import struct

from dynamo.base import errors
from dynamo.runtime.backends.nats import connection
from dynamo.runtime.events import Event, Listener

log = logging.getLogger(__name__)
_HEADER = struct.Struct(">QQ")
_TOPIC = re.compile(r"[^\s*>/]+/[^\s*>/]+/[^\s*>/]+")


class NatsEventPlane:
    """One process's publishing and listening."""

    def __init__(self, to_nats: connection.NatsConnection, instance_id: int) -> None:
        self._nats = to_nats
        self._instance_id = instance_id
        self._channels: dict[str, _Channel] = {}
        self._subscriptions: list[NatsEventSubscription] = []
        self._is_open = True

    async def advertise(self, topic: str) -> None:
        self._channels.setdefault(topic, _Channel(subject(topic)))

    def publish(self, topic: str, payload: bytes) -> None:
        if not self._is_open:
            return
        channel = self._channels.get(topic)
        if channel is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        limit = self._nats.max_message_bytes - _HEADER.size
        if len(payload) > limit:
            raise errors.LocalProtocolError(
                f"event on {topic!r} has {len(payload)} bytes, expected at most {limit} (the server's max_payload)"
            )
        header = _HEADER.pack(self._instance_id, channel.next_number)
        channel.next_number += 1
        self._nats.publish(channel.subject, header + payload)

    async def subscribe(self, topic: str, listener: Listener) -> "NatsEventSubscription":
        subscription = NatsEventSubscription(topic, listener)
        self._subscriptions.append(subscription)
        await subscription.begin(self._nats)
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in self._subscriptions:
            await subscription.close()


class NatsEventSubscription:
    """One listener's subscription to one topic; events that come within a turn of the event loop are one batch."""

    def __init__(self, topic: str, listener: Listener) -> None:
        self._topic = topic
        self._listener = listener
        self._batch: list[Event] = []
        self._subscription: connection.SubjectSubscription | None = None
        self._is_open = True

    async def begin(self, to_nats: connection.NatsConnection) -> None:
        """Subscribe at the server; called once."""
        self._subscription = await to_nats.subscribe(subject(self._topic), self._receive)

    async def close(self) -> None:
        self._is_open = False
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    def _receive(self, subject: str, reply: str, message: bytes) -> None:
        if len(message) < _HEADER.size:
            log.warning("dropped a malformed event message on %s", subject)
            return
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        publisher, number = _HEADER.unpack_from(message)
        self._batch.append(
            Event(
                topic=self._topic,
                publisher=publisher,
                number=number,
                payload=message[_HEADER.size :],
            )
        )

    def _deliver(self) -> None:
        batch, self._batch = self._batch, []
        if self._is_open:
            self._listener(batch)


class _Channel:
    """A topic that this process publishes."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.next_number = 0


def subject(topic: str) -> str:
    """Return the subject of a topic. Raises LocalProtocolError."""
    if not _TOPIC.fullmatch(topic):
        raise errors.LocalProtocolError(
            f"{topic!r} is no topic: expected {{namespace}}/{{component}}/{{event}}"
        )
    namespace, component, event = topic.split("/")
    return f"namespace.{namespace}.component.{component}.{event}"
