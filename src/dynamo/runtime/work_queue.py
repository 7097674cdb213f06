"""The seam for work that any of several processes may take: one pulls an item, and acknowledges it when it is done.

An item that is not acknowledged in time, because its worker died or forgot it, is handed to another: *at least once*.
Who must not do a thing twice looks at what it is about to do. Everything is bounded: the age of an item, their number,
their bytes.

Implementations: `backends.memory_work_queue` (one process) and `backends.nats.work_queue` (JetStream: what is in it
outlives every process, the server too). `tests/contract/test_work_queue.py` runs one suite over both.
`disagg.shared_queue` uses it.
"""

from dataclasses import dataclass
from typing import Protocol

from dynamo.base import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQueueBounds:
    """What a queue may hold. All who open a queue of one name say the same."""

    max_age_s: float = 600.0  # older items vanish, those too that somebody works on
    max_items: int = 10_000  # waiting and in work
    max_bytes: int = 256 * 2**20  # of them all
    max_item_bytes: int = 512 * 2**10
    acknowledge_s: float = 30.0  # after the pull or the last `keep`, until another gets it


class WorkItem(Protocol):
    """One piece of work, as whoever pulled it holds it."""

    @property
    def body(self) -> bytes:
        """What was pushed."""
        ...

    @property
    def num_deliveries(self) -> int:
        """How many have pulled it, us included. Above 1: somebody else may have begun, or finished, it."""
        ...

    async def acknowledge(self) -> None:
        """It is done. No error if it was handed to another meanwhile. Raises Unavailable."""
        ...

    async def keep(self) -> None:
        """We are still at it: the time to acknowledge begins anew. Raises Unavailable."""
        ...

    async def give_back(self, *, after_s: float = 0.0) -> None:
        """We will not do it: another may have it, at once or after this time. Raises Unavailable."""
        ...


class WorkQueue(Protocol):
    """Push at one end, pull at the other, the oldest first."""

    async def push(self, body: bytes) -> None:
        """Put it in. Raises Overloaded (it is full), Unavailable, LocalProtocolError (the item is too long)."""
        ...

    async def pull(self, timeout_s: float) -> WorkItem | None:
        """The oldest that nobody works on; None if there is none within this time. Raises Unavailable."""
        ...

    async def depth(self) -> int:
        """How many are not acknowledged yet: those that wait, and those in work. Raises Unavailable."""
        ...

    async def num_waiting(self) -> int:
        """How many nobody works on. What was given back may be missing. Raises Unavailable."""
        ...

    async def close(self) -> None:
        """Leave. What we pulled and did not acknowledge goes to others when its time is over."""
        ...


def check_length(body: bytes, bounds: WorkQueueBounds) -> None:
    """Raises LocalProtocolError if the item is too long."""
    if len(body) > bounds.max_item_bytes:
        raise errors.LocalProtocolError(
            f"an item of {len(body)} bytes for a work queue, expected at most {bounds.max_item_bytes}"
        )
