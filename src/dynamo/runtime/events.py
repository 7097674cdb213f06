"""The event plane: messages that a process publishes to all present listeners of a topic, such as load or life cycle.

Delivery is not promised, so each publisher numbers its messages on a topic from 0, and a listener that sees a gap knows
that it missed some. How they are recovered is the listener's affair.

Implementations: `backends.memory`, `backends.zmq` (the default: each publisher binds a socket and writes its address
into discovery), `backends.nats.events`. `tests/contract/test_event_plane.py` runs one suite over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message as a listener gets it."""

    topic: str
    publisher: int  # instance id
    number: int  # counts from 0 for each publisher and topic
    payload: bytes


Listener = Callable[[list[Event]], None]


class Subscription(Protocol):
    """A listener's subscription to a topic."""

    async def close(self) -> None:
        """Deliver no more events to the listener."""
        ...


class EventPlane(Protocol):
    """Publish to a topic, subscribe to a topic: `{namespace}/{component}/{event}`."""

    async def advertise(self, topic: str) -> None:
        """Make this process known as a publisher of `topic`; before its first publish."""
        ...

    def publish(self, topic: str, payload: bytes) -> None:
        """Send a message to all present listeners. Never waits: a listener that is too slow misses messages."""
        ...

    async def subscribe(self, topic: str, listener: Listener) -> Subscription:
        """Hear all present and future publishers of `topic`; batches come on the event loop's thread."""
        ...

    async def close(self) -> None:
        """Leave; this process's channels vanish from discovery."""
        ...
