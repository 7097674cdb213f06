"""The seam for what one process tells to whoever listens: KV events, load, life cycle.

Nothing is promised about delivery, so each publisher numbers its messages on a topic from 0, and a listener that sees
a hole knows that it missed something. What is repaired, and how, is the listener's affair.

Implementations: `backends.memory_events`, `backends.zmq` (the default: each publisher binds a socket and writes its
address into discovery), `backends.nats.events`. `tests/contract/test_event_plane.py` runs one suite over all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message as a listener gets it."""

    topic: str
    publisher: int  # instance id of who said it
    number: int  # counts from 0 for each publisher and topic
    payload: bytes


Listener = Callable[[list[Event]], None]


class Subscription(Protocol):
    """A standing wish to hear a topic."""

    async def close(self) -> None:
        """Hear nothing more."""
        ...


class EventPlane(Protocol):
    """Publish to a topic, subscribe to a topic: `{namespace}/{component}/{event}`."""

    async def advertise(self, topic: str) -> None:
        """Make this process known as a publisher of `topic`; before its first publish."""
        ...

    def publish(self, topic: str, payload: bytes) -> None:
        """Say it to whoever listens now. Never waits: if a listener is too slow, it misses messages."""
        ...

    async def subscribe(self, topic: str, listener: Listener) -> Subscription:
        """Hear all publishers of `topic`, those that come later too; batches come on the event loop's thread."""
        ...

    async def close(self) -> None:
        """Leave; our channels vanish from discovery."""
        ...
