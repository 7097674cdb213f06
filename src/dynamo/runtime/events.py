"""The event plane: messages that a process publishes to all present listeners of a topic, such as load or life cycle.

Delivery is not promised, so each publisher numbers its messages on a topic from 0, and a listener that sees a gap knows
that it missed some. How they are recovered is the listener's affair.

Implementations: `backends.memory`, `backends.zmq` (the default: each publisher binds a socket and writes its address
into discovery), `backends.nats.planes`. `tests/contract/test_event_plane.py` runs one suite over all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message as a listener gets it. A number that is skipped was lost on its way."""

    topic: str
    publisher: int  # instance id
    number: int  # counts from 0 for each publisher and topic
    payload: bytes


Listener = Callable[[list[Event]], None]


class Subscription(Protocol):
    """A listener's subscription to a topic, from `EventPlane.subscribe` until `close`."""

    async def close(self) -> None:
        """Deliver no more events to the listener."""
        ...


class EventPlane(Protocol):
    """Publish to a topic, subscribe to a topic: `{namespace}/{component}/{event}`."""

    async def advertise(self, topic: str) -> None:
        """Make this process known as a publisher of `topic`; before its first publish."""
        ...

    async def listen(self) -> None:
        """Listen for subscribers now, before anything is advertised. Raises ConfigError."""
        ...

    def publish(self, topic: str, payload: bytes) -> None:
        """Send a message to all present listeners. Never waits: a listener that is too slow misses messages."""
        ...

    async def subscribe(self, topic: str, listener: Listener) -> Subscription:
        """Hear all present and future publishers of `topic`; batches come on the event loop's thread."""
        ...

    def reconnect(self, topic: str, publisher: int) -> None:
        """Connect to a publisher anew, because it is silent; without an effect where no connection is its own."""
        ...

    async def close(self) -> None:
        """Leave; this process's channels vanish from discovery."""
        ...


class PublishedTopics:
    """The topics that a process has advertised, and the next number of each."""

    def __init__(self) -> None:
        self._next_number_by_topic: dict[str, int] = {}

    def add(self, topic: str) -> None:
        self._next_number_by_topic.setdefault(topic, 0)

    def take_number(self, topic: str) -> int:
        """Return the number of the message that is published now. Raises LocalProtocolError for an unknown topic."""
        number = self._next_number_by_topic.get(topic)
        if number is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        self._next_number_by_topic[topic] = number + 1
        return number


class BatchedSubscription:
    """A subscription that hands its listener as one batch what came within a turn of the event loop.

    Of more than `max_events` in one turn the later ones are lost.
    """

    def __init__(self, topic: str, listener: Listener, *, max_events: int) -> None:
        self.topic = topic
        # ends the delivery at its source
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._listener = listener
        self._max_events = max_events
        self._batch: list[Event] = []
        self._is_open = True

    def add_event(self, event: Event) -> None:
        """Take an event for the next batch."""
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        if len(self._batch) < self._max_events:
            self._batch.append(event)

    async def close(self) -> None:
        self._is_open = False
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            await on_close()

    def _deliver(self) -> None:
        batch, self._batch = self._batch, []
        if self._is_open:
            self._listener(batch)
