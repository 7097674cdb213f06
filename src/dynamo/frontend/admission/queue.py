"""The queue of requests that wait for a permit: bounded, higher priority first, then tenants in turn.

Of one priority, each tenant's first request has the turn of the first that waits there, and its next ones the turns
after it: a tenant with hundreds of requests delays another by one (start-time fair queueing, Goyal et al. 1996,
with requests of equal size). Requests of one turn are in order of arrival, as all are where there is one tenant. When
the queue is full, a request displaces the last one of the tenant with most requests, if its own tenant has fewer.

The queue is short (its bound is a setting), so a sorted list does: a request is added and removed at the cost of a
bisection and a memmove. `CompletionRate` estimates how long a request will wait.
"""  # decider

import bisect
import collections
import itertools
import operator
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
_RATE_SAMPLES = 64
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    minus_priority: int
    turn: int = 0
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class QueuePosition(Generic[P]):
    """The position of one waiting request; `waiter` is what the owner of the queue wakes."""

    rank: _Rank
    tenant: str
    num_tokens: int
    waiter: P


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant and priority."""

    num_waiting: int = 0
    last_turn: int = 0


class WaitingQueue(Generic[P]):
    """Holds at most `limit` waiting requests, sorted by rank."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._positions: list[QueuePosition[P]] = []  # by rank
        self._lines: dict[tuple[str, int], _Line] = {}  # by tenant and priority
        self._arrivals = itertools.count()
        self.num_tokens = 0  # of all prompts that wait

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def is_full(self) -> bool:
        """Return whether no further request can wait."""
        return len(self._positions) >= self._limit

    def append(
        self, waiter: P, *, priority: int, num_tokens: int, tenant: str = ""
    ) -> QueuePosition[P]:
        """Add a request at the next turn of its tenant and priority. The queue must not be full."""
        line = self._lines.setdefault((tenant, -priority), _Line())
        first = bisect.bisect_left(self._positions, _Rank(-priority), key=_rank_of)
        has_others = first < len(self._positions) and (
            self._positions[first].rank.minus_priority == -priority
        )
        now = self._positions[first].rank.turn if has_others else 0
        line.last_turn = max(now, line.last_turn + 1) if line.num_waiting else now
        line.num_waiting += 1
        rank = _Rank(-priority, line.last_turn, next(self._arrivals))
        position = QueuePosition(rank, tenant, num_tokens, waiter)
        bisect.insort(self._positions, position, key=_rank_of)
        self.num_tokens += num_tokens
        return position

    def displace(self, *, priority: int, tenant: str) -> QueuePosition[P] | None:
        """Remove and return the request that gives way to another of this tenant; None: the other has to be refused."""
        numbers = collections.Counter(position.tenant for position in self._positions)
        longest, number = max(numbers.items(), key=operator.itemgetter(1), default=("", 0))
        last = next((each for each in reversed(self._positions) if each.tenant == longest), None)
        if last is None or number <= numbers[tenant] + 1 or last.rank.minus_priority < -priority:
            return None
        self.remove(last)
        return last

    def remove(self, position: QueuePosition[P]) -> bool:
        """Remove a request; return whether it was still in the queue."""
        index = bisect.bisect_left(self._positions, position.rank, key=_rank_of)
        if index == len(self._positions) or self._positions[index] is not position:
            return False
        del self._positions[index]
        self.num_tokens -= position.num_tokens
        key = position.tenant, position.rank.minus_priority
        self._lines[key].num_waiting -= 1
        if not self._lines[key].num_waiting:
            del self._lines[key]
        return True

    def pop_first(self) -> QueuePosition[P]:
        """Remove and return the first request. The queue must not be empty."""
        position = self._positions[0]
        self.remove(position)
        return position


def _rank_of(position: QueuePosition[P]) -> _Rank:
    return position.rank


class CompletionRate:
    """How fast requests end, by the last few that did."""

    def __init__(self) -> None:
        self._completed_at: collections.deque[float] = collections.deque(maxlen=_RATE_SAMPLES)

    def record_completion(self, now: float) -> None:
        """Record that a request ended at `now`."""
        self._completed_at.append(now)

    def estimate_wait_s(self, num_ahead: int, now: float) -> float:
        """Estimate the seconds until `num_ahead` requests and one more have ended, between 1 and 60.

        With fewer than two completed requests nothing is known, and the estimate is 1 second.
        """
        if len(self._completed_at) < 2:
            return _MIN_WAIT_S
        per_request_s = (now - self._completed_at[0]) / len(self._completed_at)
        return min(_MAX_WAIT_S, max(_MIN_WAIT_S, (num_ahead + 1) * per_request_s))


def count_admissible(
    num_permits: int, limit: int | None, num_free_workers: int | None
) -> int | None:
    """Return how many requests may be admitted now: unused permits, but one for each free worker; None: any number."""
    bounds = [] if limit is None else [max(0, limit - num_permits)]
    if num_free_workers is not None:
        bounds.append(num_free_workers)
    return min(bounds, default=None)
