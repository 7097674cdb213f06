"""The line of requests that wait for room: bounded, the higher priority first, then who came first; and its pace.

It is short (its bound is a setting), so a sorted list does: joining and leaving cost a bisection and a memmove.
"""

import bisect
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
_PACE_SAMPLES = 64
_LEAST_S, _MOST_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    minus_priority: int
    arrival: int


@dataclass(frozen=True, slots=True)
class QueuePosition(Generic[P]):
    """A place in the line; `waiter` is who is told when it is its turn."""

    rank: _Rank
    num_tokens: int
    waiter: P


class WaitingQueue(Generic[P]):
    """Holds at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tickets: list[QueuePosition[P]] = []  # by rank
        self._arrivals = itertools.count()
        self.num_tokens = 0  # of all prompts that wait

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def is_full(self) -> bool:
        """Nobody can join now."""
        return len(self._tickets) >= self._limit

    def join(self, waiter: P, *, priority: int, num_tokens: int) -> QueuePosition[P]:
        """Take a place; only where the line is not full."""
        ticket = QueuePosition(_Rank(-priority, next(self._arrivals)), num_tokens, waiter)
        bisect.insort(self._tickets, ticket, key=_rank)
        self.num_tokens += num_tokens
        return ticket

    def leave(self, ticket: QueuePosition[P]) -> bool:
        """Give a place up; says whether it was still held."""
        at = bisect.bisect_left(self._tickets, ticket.rank, key=_rank)
        if at == len(self._tickets) or self._tickets[at] is not ticket:
            return False
        del self._tickets[at]
        self.num_tokens -= ticket.num_tokens
        return True

    def next(self) -> QueuePosition[P]:
        """Whose turn it is leaves the line."""
        ticket = self._tickets[0]
        self.leave(ticket)
        return ticket


def _rank(ticket: QueuePosition[P]) -> _Rank:
    return ticket.rank


class CompletionRate:
    """How fast requests end, by the last few that did."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=_PACE_SAMPLES)

    def ended(self, now: float) -> None:
        """One did."""
        self._ended_at.append(now)

    def wait_s(self, num_before: int, now: float) -> float:
        """How long until so many have ended, and one more: 1 to 60 seconds; the least if nothing is known."""
        if len(self._ended_at) < 2:
            return _LEAST_S
        per_request_s = (now - self._ended_at[0]) / len(self._ended_at)
        return min(_MOST_S, max(_LEAST_S, (num_before + 1) * per_request_s))


def count_admissible(
    num_inside: int, limit: int | None, num_free_workers: int | None
) -> int | None:
    """How many may come in now: slots that are free, and one for each worker that is not busy. None: any number."""
    parts = [] if limit is None else [max(0, limit - num_inside)]
    if num_free_workers is not None:
        parts.append(num_free_workers)
    return min(parts, default=None)
