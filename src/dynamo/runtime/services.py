"""The services that a process may use beside its planes: work queues and an object store.

An item of work is pulled by one of several processes, which acknowledges it when it is done. One that is not
acknowledged in time, because its worker died or forgot it, is delivered to another: *at least once*. A worker that must
not do an item twice checks before it begins. The age of an item, the number of items and their bytes are bounded.

An object's key is made of its content, so it never changes, many processes may store the same one, and a reader can
check it. No object stays for ever: a process that needs it stores it again in time, which costs nothing while it is
fresh.

With planes in memory both are in memory too (`backends.memory`). Else they are JetStream's, and the process connects to
NATS when it first needs them (`backends.nats.services`).
`tests/contract/test_work_queue.py` and `tests/contract/test_object_store.py` run over both.
"""

from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQueueBounds:
    """The limits of a queue. All processes that open a queue of one name give the same."""

    max_age_s: float = 600.0  # older items vanish, even if a worker holds them
    max_items: int = 10_000  # waiting and in work
    max_bytes: int = 256 * 2**20  # of all items
    max_item_bytes: int = 512 * 2**10
    acknowledge_s: float = 30.0  # after the pull or the last `keep`, until another worker gets it


class WorkItem(Protocol):
    """One item, as the worker that pulled it holds it."""

    @property
    def body(self) -> bytes:
        """The bytes that were pushed."""
        ...

    @property
    def num_deliveries(self) -> int:
        """The number of pulls of this item, this one included; above 1, another worker may have begun or done it."""
        ...

    async def acknowledge(self) -> None:
        """Remove the item, because it is done; no error if it was delivered again meanwhile. Raises Unavailable."""
        ...

    async def keep(self) -> None:
        """Restart the time to acknowledge, because the work goes on. Raises Unavailable."""
        ...

    async def give_back(self, *, after_s: float = 0.0) -> None:
        """Let another worker have the item, at once or after `after_s` seconds. Raises Unavailable."""
        ...


class WorkQueue(Protocol):
    """Push at one end, pull at the other, the oldest first."""

    async def push(self, body: bytes) -> None:
        """Add an item. Raises Overloaded (the queue is full), Unavailable, LocalProtocolError (it is too long)."""
        ...

    async def pull(self, timeout_s: float) -> WorkItem | None:
        """Pull the oldest item that is not in work; None if there is none within `timeout_s`. Raises Unavailable."""
        ...

    async def depth(self) -> int:
        """Return the number of items that are not acknowledged, waiting and in work. Raises Unavailable."""
        ...

    async def num_waiting(self) -> int:
        """Return the number of items that are not in work; given-back ones may be missing. Raises Unavailable."""
        ...

    async def close(self) -> None:
        """Leave the queue. Pulled items that are not acknowledged go to others when their time is over."""
        ...


def check_item_length(body: bytes, bounds: WorkQueueBounds) -> None:
    """Raise LocalProtocolError if the item is too long."""
    if len(body) > bounds.max_item_bytes:
        raise errors.LocalProtocolError(
            f"an item of {len(body)} bytes for a work queue, expected at most {bounds.max_item_bytes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreBounds:
    """The limits of an object store: seconds, and bytes of all objects and of one."""

    max_age_s: float = 24 * 3600.0  # objects that were not stored again vanish
    max_bytes: int = 2**30  # of all objects; the server reserves this much disk
    max_object_bytes: int = 256 * 2**20

    @property
    def fresh_s(self) -> float:
        """The age in seconds up to which an object need not be stored again."""
        return self.max_age_s / 3


class ObjectStore(Protocol):
    """Objects by key, shared by all processes of the deployment."""

    async def put(self, key: str, body: bytes) -> str:
        """Store an object, unless a fresh one is there, and return its URL.

        Raises Overloaded (the store is full), Unavailable, LocalProtocolError (the object is too long).
        """
        ...

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        """Return an object. Raises Unavailable if it is not there, is too long, or does not come within `timeout_s`."""
        ...


def check_object_length(body: bytes, bounds: ObjectStoreBounds) -> None:
    """Raise LocalProtocolError if the object is too long."""
    if len(body) > bounds.max_object_bytes:
        raise errors.LocalProtocolError(
            f"an object of {len(body)} bytes for a store, expected at most {bounds.max_object_bytes}"
        )


class Services(Protocol):
    """The work queues and the object store of one process, over one server."""

    async def work_queue(self, name: str, bounds: WorkQueueBounds) -> WorkQueue:
        """Join the queue of this name. Raises ConfigError if there is no server, Unavailable if it does not answer."""
        ...

    def object_store(self) -> ObjectStore | None:
        """Return the object store; None if this process is not connected to a server that could keep objects."""
        ...

    async def close(self) -> None:
        """Disconnect; the planes are closed before."""
        ...
