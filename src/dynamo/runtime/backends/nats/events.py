"""The event plane over NATS: a topic is a subject, and the server knows who listens. Nothing stands in discovery.

    topic     {namespace}/{component}/{event}
    subject   namespace.{namespace}.component.{component}.{event}
    message   publisher id (u64, big-endian) · number (the same) · payload

What may be missed: what is said while there is no server, what a listener is too slow for, and what the server held
when it died. Numbers show all three: they go on while nobody can hear.
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

    def __init__(self, to_nats: connection.Connection, instance_id: int) -> None:
        self._nats = to_nats
        self._instance_id = instance_id
        self._channels: dict[str, _Channel] = {}
        self._subscriptions: list[NatsSubscription] = []
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

    async def subscribe(self, topic: str, listener: Listener) -> "NatsSubscription":
        subscription = NatsSubscription(topic, listener)
        self._subscriptions.append(subscription)
        await subscription.begin(self._nats)
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in self._subscriptions:
            await subscription.close()


class NatsSubscription:
    """One listener's wish to hear one topic; what comes within a turn of the event loop is one batch."""

    def __init__(self, topic: str, listener: Listener) -> None:
        self._topic = topic
        self._listener = listener
        self._batch: list[Event] = []
        self._at_nats: connection.Subscription | None = None
        self._is_open = True

    async def begin(self, to_nats: connection.Connection) -> None:
        """Once."""
        self._at_nats = await to_nats.subscribe(subject(self._topic), self._hear)

    async def close(self) -> None:
        self._is_open = False
        if self._at_nats is not None:
            await self._at_nats.close()
            self._at_nats = None

    def _hear(self, subject: str, reply: str, message: bytes) -> None:
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
    """A topic that we publish."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.next_number = 0


def subject(topic: str) -> str:
    """Where a topic is heard. Raises LocalProtocolError."""
    if not _TOPIC.fullmatch(topic):
        raise errors.LocalProtocolError(
            f"{topic!r} is no topic: expected {{namespace}}/{{component}}/{{event}}"
        )
    namespace, component, event = topic.split("/")
    return f"namespace.{namespace}.component.{component}.{event}"
