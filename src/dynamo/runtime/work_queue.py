"""Work queues: an item of work is pulled by one of several processes, which acknowledges it when it is done.

An item that is not acknowledged in time, because its worker died or forgot it, is delivered to another: *at least
once*. A worker that must not do an item twice checks before it begins. Everything is bounded: the age of an item, the
number of items, their bytes.

Implementations: `backends.memory` (one process) and `backends.nats.jetstream` (its items outlive every process, the
server too). `tests/contract/test_work_queue.py` runs one suite over both. `disagg.shared_queue` uses it.
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


def check_length(body: bytes, bounds: WorkQueueBounds) -> None:
    """Raise LocalProtocolError if the item is too long."""
    if len(body) > bounds.max_item_bytes:
        raise errors.LocalProtocolError(
            f"an item of {len(body)} bytes for a work queue, expected at most {bounds.max_item_bytes}"
        )
