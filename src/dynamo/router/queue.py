"""Requests that wait in the router, because a worker's queue cannot be re-ordered, re-routed or shared any more.

    fcfs       first come, first served
    wspt       weighted shortest processing time, aged: as if a request had come by `AGING` × its work later
    deadline   whose first token is wanted soonest
    lcfs       last come, first served: for callers who give up soon

`priority` counts as seconds of earlier arrival; under wspt it divides the work as well.

Nobody starves: who has waited longer than `patience_s` goes before all others, in order of arrival. Under wspt nobody
gets that far in practice, since whoever arrives later than `AGING` × one's own work cannot pass.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dynamo.base import errors
from dynamo.router.api import Prompt

Order = Literal["fcfs", "wspt", "deadline", "lcfs"]
AGING = 2.0
_DEFAULT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One request of the queue. `work_s`: how long its prompt would be computed where most of it is cached."""

    request_id: str
    prompt: Prompt
    arrival: float
    work_s: float


_KEYS: dict[str, Callable[[Waiting], float]] = {
    "fcfs": lambda w: w.arrival - w.prompt.priority,
    "wspt": lambda w: (
        w.arrival - w.prompt.priority + AGING * w.work_s / (1 + max(0.0, w.prompt.priority))
    ),
    "deadline": lambda w: (
        (w.arrival + _DEFAULT_DEADLINE_S if w.prompt.deadline is None else w.prompt.deadline)
        - w.prompt.priority
    ),
    "lcfs": lambda w: -w.arrival - w.prompt.priority,
}


class WaitingQueue:
    """Mutable; bounded by `max_size`."""

    def __init__(self, order: Order, *, max_size: int = 4096, patience_s: float = 120.0) -> None:
        self._key = _KEYS[order]
        self._max_size = max_size
        self._patience_s = patience_s
        self._by_id: dict[str, tuple[float, int, Waiting]] = {}  # in order of arrival
        self._sorted: list[tuple[float, int, Waiting]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def push(self, waiting: Waiting) -> None:
        """Take a request whose id is not in the queue. Raises Overloaded if it is full."""
        if len(self._sorted) >= self._max_size:
            raise errors.Overloaded(
                f"{self._max_size} requests wait for a worker already (--router-queue-size): try again later"
            )
        self._count += 1
        entry = (self._key(waiting), self._count, waiting)
        self._by_id[waiting.request_id] = entry
        bisect.insort(self._sorted, entry)

    def remove(self, request_id: str) -> bool:
        """It goes, or gave up. Returns whether it was there."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return False
        del self._sorted[bisect.bisect_left(self._sorted, entry[:2], key=lambda e: e[:2])]
        return True

    def in_order(self, now: float) -> Iterator[Waiting]:
        """All, whose turn it is first. The queue must not change meanwhile."""
        overdue = set()
        for _, count, waiting in self._by_id.values():
            if now - waiting.arrival < self._patience_s:
                break
            overdue.add(count)
            yield waiting
        for _, count, waiting in self._sorted:
            if count not in overdue:
                yield waiting
