"""The queue in front of a pool of equal workers: how many of them hold a waiting time.

The wait in an M/G/c queue is longer than t with a probability of about ErlangC(c, a) * exp(-2 (c - a) t / (b s)), with
a = arrivals * s busy workers and burstiness b: 1 for Poisson arrivals of equal prompts, more for prompts of different
lengths and for bursts. Times are seconds.
"""

import functools
import math
from collections.abc import Mapping

_MOST_WORKERS = 100_000


def erlang_c(num_workers: int, busy: float) -> float:
    """Return the probability that a request waits, with `busy` workers busy on average."""
    if busy >= num_workers:
        return 1.0
    blocking = _blocking_by_workers(busy)
    for k in range(len(blocking), num_workers + 1):
        blocking.append(busy * blocking[-1] / (k + busy * blocking[-1]))
    return blocking[num_workers] / (1 - busy / num_workers * (1 - blocking[num_workers]))


@functools.lru_cache(maxsize=8)  # a search asks for many numbers of workers under one load
def _blocking_by_workers(busy: float) -> list[float]:
    """Return Erlang's formula B by the number of workers, as far as its recursion has come for this load."""
    return [1.0]


def late_share(
    num_workers: int,
    *,
    requests_per_s: float,
    service_s: float,
    waits_s: Mapping[float, float],
    burstiness: float,
) -> float:
    """Return the share of requests that wait longer than they may; `waits_s` has the shares by that time."""
    busy = requests_per_s * service_s
    if busy >= num_workers:
        return 1.0
    decay = 2 * (num_workers - busy) / (burstiness * service_s)
    late = sum(
        share * math.exp(-min(700.0, decay * wait_s)) if wait_s >= 0 else share
        for wait_s, share in waits_s.items()
    )
    return erlang_c(num_workers, busy) * late / sum(waits_s.values())


def least_workers(
    *,
    requests_per_s: float,
    service_s: float,
    waits_s: Mapping[float, float],
    burstiness: float = 1.0,
    most_late: float = 0.05,
) -> int:
    """Return the least workers with which at most `most_late` of the requests wait too long; 0 for no requests."""
    if requests_per_s * service_s <= 0:
        return 0
    least = math.floor(requests_per_s * service_s) + 1
    low, high = least, least

    case = {"requests_per_s": requests_per_s, "service_s": service_s, "burstiness": burstiness}

    def is_late(number: int) -> bool:
        return late_share(number, **case, waits_s=waits_s) > most_late

    while is_late(high):
        if high > _MOST_WORKERS:
            return high
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_late(middle) else (low, middle)
    return low
