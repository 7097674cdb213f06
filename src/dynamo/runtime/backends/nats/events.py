"""The event plane over NATS: a topic is a subject, and the server knows the listeners. Nothing is in discovery.

    topic     {namespace}/{component}/{event}
    subject   namespace.{namespace}.component.{component}.{event}
    message   publisher id (u64, big-endian) · number (the same) · payload

Listeners miss events that are published while there is no server, that they are too slow for, and that the server held
when it died. Numbers show all three: they go on while no listener is connected.
"""

import functools
import logging
import re
import struct

from dynamo.base import errors
from dynamo.observability import logs
from dynamo.runtime.backends.nats import connection
from dynamo.runtime.events import BatchedSubscription, Event, Listener, PublishedTopics

log = logging.getLogger(__name__)
_HEADER = struct.Struct(">QQ")
BATCH_LIMIT = 10_000  # events of one listener within one turn of the event loop
_TOPIC = re.compile(r"[^\s*>/]+/[^\s*>/]+/[^\s*>/]+")


class NatsEventPlane:
    """One process's publishing and listening."""

    def __init__(self, to_nats: connection.NatsConnection, instance_id: int) -> None:
        self._nats = to_nats
        self._instance_id = instance_id
        self._log = logs.PeerLog(log, to_nats.clock.now)
        self._topics = PublishedTopics()
        self._subscriptions: list[BatchedSubscription] = []
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
        self._subscriptions.append(subscription)

        def receive(subject: str, reply: str, message: bytes) -> None:
            if len(message) < _HEADER.size:
                self._log.warning("", "dropped a malformed event message on %s", subject)
                return
            publisher, number = _HEADER.unpack_from(message)
            payload = message[_HEADER.size :]
            subscription.add_event(
                Event(topic=topic, publisher=publisher, number=number, payload=payload)
            )

        subscription.on_close = (await self._nats.subscribe(subject(topic), receive)).close
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in self._subscriptions:
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
