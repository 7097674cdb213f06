"""The queue of the router: requests wait here, because in a worker's queue they cannot be re-ordered or re-routed.

    fcfs       first come, first served
    wspt       weighted shortest processing time, aged: as if a request had come later by `AGING` × its work
    deadline   the request with the earliest time for its first token
    lcfs       last come, first served: for callers that give up soon

`priority` counts as seconds of earlier arrival; under wspt it divides the work as well.

No request starves: one that has waited longer than `patience_s` goes before all others, in order of arrival. Under
wspt hardly any waits that long, since a request that arrives later than `AGING` × another's work cannot overtake it.
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
class QueuedRequest:
    """One request of the queue. `work_s`: seconds to compute its prompt where most of it is cached."""

    request_id: str
    prompt: Prompt
    arrival: float
    work_s: float


_SORT_KEYS: dict[str, Callable[[QueuedRequest], float]] = {
    "fcfs": lambda r: r.arrival - r.prompt.priority,
    "wspt": lambda r: (
        r.arrival - r.prompt.priority + AGING * r.work_s / (1 + max(0.0, r.prompt.priority))
    ),
    "deadline": lambda r: (
        (r.arrival + _DEFAULT_DEADLINE_S if r.prompt.deadline is None else r.prompt.deadline)
        - r.prompt.priority
    ),
    "lcfs": lambda r: -r.arrival - r.prompt.priority,
}


class RequestQueue:
    """Queued requests in order of arrival and of the queue policy. Mutable; holds at most `max_size`."""

    def __init__(self, order: Order, *, max_size: int = 4096, patience_s: float = 120.0) -> None:
        self._key = _SORT_KEYS[order]
        self._max_size = max_size
        self._patience_s = patience_s
        self._by_id: dict[str, tuple[float, int, QueuedRequest]] = {}  # in order of arrival
        self._sorted: list[tuple[float, int, QueuedRequest]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def push(self, request: QueuedRequest) -> None:
        """Add a request with an id that is not in the queue. Raises Overloaded if the queue is full."""
        if len(self._sorted) >= self._max_size:
            raise errors.Overloaded(
                f"{self._max_size} requests wait for a worker already (--router-queue-size): try again later"
            )
        self._count += 1
        entry = (self._key(request), self._count, request)
        self._by_id[request.request_id] = entry
        bisect.insort(self._sorted, entry)

    def remove(self, request_id: str) -> bool:
        """Remove a request that is sent or cancelled. Returns False if it was not in the queue."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return False
        del self._sorted[bisect.bisect_left(self._sorted, entry[:2], key=lambda e: e[:2])]
        return True

    def in_order(self, now: float) -> Iterator[QueuedRequest]:
        """Yield all requests, the next to be sent first. The queue must not change meanwhile."""
        overdue = set()
        for _, count, request in self._by_id.values():
            if now - request.arrival < self._patience_s:
                break
            overdue.add(count)
            yield request
        for _, count, request in self._sorted:
            if count not in overdue:
                yield request
