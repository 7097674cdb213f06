"""A work queue for the parts of one process, which share a `MemoryWork`.

No timers: an item has a time from which it is free, in the future while somebody works on it. Who pulls waits until
something is pushed or given back, or the next item becomes free.
"""

import asyncio

from dynamo.base import errors
from dynamo.runtime import work_queue


class _Entry:
    """An item that is not acknowledged yet."""

    def __init__(self, body: bytes, now: float) -> None:
        self.body = body
        self.pushed_at = now
        self.free_at = now
        self.num_deliveries = 0


class MemoryWork:
    """What is to be done, the oldest first."""

    def __init__(self, bounds: work_queue.Bounds = work_queue.Bounds()) -> None:  # noqa: B008 (a frozen value)
        self.bounds = bounds
        self._entries: dict[_Entry, None] = {}
        self._num_bytes = 0
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """Of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def add(self, body: bytes) -> None:
        """Raises Overloaded."""
        depth = self.depth()
        is_full = self._num_bytes + len(body) > self.bounds.max_bytes
        if is_full or depth >= self.bounds.max_items:
            raise errors.Overloaded(f"the work queue is full: {depth} items are in it; try later")
        self._entries[_Entry(body, self.now)] = None
        self._num_bytes += len(body)
        self._wake()

    def take(self) -> _Entry | None:
        """The oldest that is free."""
        self._forget_old()
        entry = next((e for e in self._entries if e.free_at <= self.now), None)
        if entry is not None:
            entry.num_deliveries += 1
            entry.free_at = self.now + self.bounds.acknowledge_s
        return entry

    async def wait(self, until: float) -> None:
        """Until something may be free that was not, or this time has come."""
        soonest = min((e.free_at for e in self._entries), default=until)
        try:
            async with asyncio.timeout_at(min(soonest, until)):
                await self._changed.wait()
        except TimeoutError:
            return

    def hold(self, entry: _Entry, delivery: int, for_s: float) -> None:
        """Whoever pulled it at this delivery keeps it so long."""
        if entry.num_deliveries == delivery:
            entry.free_at = self.now + for_s
            self._wake()

    def forget(self, entry: _Entry) -> None:
        """It is done, or too old."""
        if entry in self._entries:
            del self._entries[entry]
            self._num_bytes -= len(entry.body)

    def depth(self) -> int:
        self._forget_old()
        return len(self._entries)

    def num_waiting(self) -> int:
        self._forget_old()
        return sum(entry.free_at <= self.now for entry in self._entries)

    def _forget_old(self) -> None:
        born_before = self.now - self.bounds.max_age_s
        while self._entries and (oldest := next(iter(self._entries))).pushed_at <= born_before:
            self.forget(oldest)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryItem:
    """What was pulled, by one of those who pulled it."""

    def __init__(self, work: MemoryWork, entry: _Entry) -> None:
        self.body = entry.body
        self.num_deliveries = entry.num_deliveries
        self._work = work
        self._entry = entry

    async def acknowledge(self) -> None:
        self._work.forget(self._entry)

    async def keep(self) -> None:
        self._work.hold(self._entry, self.num_deliveries, self._work.bounds.acknowledge_s)

    async def give_back(self, *, after_s: float = 0.0) -> None:
        self._work.hold(self._entry, self.num_deliveries, after_s)


class MemoryWorkQueue:
    """One party's side."""

    def __init__(self, work: MemoryWork) -> None:
        self._work = work

    async def push(self, body: bytes) -> None:
        work_queue.check_length(body, self._work.bounds)
        self._work.add(body)

    async def pull(self, timeout_s: float) -> MemoryItem | None:
        until = self._work.now + timeout_s
        while (entry := self._work.take()) is None:
            if self._work.now >= until:
                return None
            await self._work.wait(until)
        return MemoryItem(self._work, entry)

    async def depth(self) -> int:
        return self._work.depth()

    async def num_waiting(self) -> int:
        return self._work.num_waiting()

    async def close(self) -> None:
        """Nothing is ours alone."""
