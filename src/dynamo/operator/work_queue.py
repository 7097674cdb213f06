"""The queue of objects to look at: each object once, one look at a time, and later after each failure."""

import asyncio
import collections
from collections.abc import Hashable
from typing import Generic, TypeVar

from dynamo.base import clock as clocks

Key = TypeVar("Key", bound=Hashable)


class KeyQueue(Generic[Key]):
    """Keys that wait for a worker. A key that is added while it is worked on waits until that is done.

    After a failure a key comes again, first after `first_delay_s`, and after each further failure twice as late.
    """

    def __init__(
        self, clock: clocks.Clock, *, first_delay_s: float = 0.4, longest_delay_s: float = 60.0
    ) -> None:
        self._clock = clock
        self._first_delay_s, self._longest_delay_s = first_delay_s, longest_delay_s
        self._waiting: collections.OrderedDict[Key, None] = collections.OrderedDict()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, clocks.Timer] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._working)

    def add(self, key: Key) -> None:
        """Have a key worked on, unless it waits for that already."""
        if key in self._working:
            self._again.add(key)
            return
        self._waiting[key] = None
        self._wake.set()

    def add_later(self, key: Key, delay_s: float) -> None:
        """Have a key worked on after a while; an earlier appointment of the key is replaced."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._timers[key] = self._clock.call_later(delay_s, self._add_due, key)

    async def take(self) -> Key:
        """Wait for a key and return it. The caller calls `release` when it is done with it."""
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        key, _ = self._waiting.popitem(last=False)
        self._working.add(key)
        return key

    def release(self, key: Key, *, has_failed: bool) -> None:
        """Note the end of the work on a key; a failed one comes again, later after each failure."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            if not has_failed:
                self.add(key)
        if not has_failed:
            self._failures.pop(key, None)
            return
        num_failures = self._failures.get(key, 0)
        self._failures[key] = num_failures + 1
        delay_s = self._first_delay_s * 2 ** min(num_failures, 20)
        self.add_later(key, min(self._longest_delay_s, delay_s))

    def close(self) -> None:
        """Cancel the appointments of all keys."""
        for timer in self._timers.values():
            timer.cancel()

    def _add_due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)
