"""The choice of the instance for the next request, where no router chooses. Instance ids are in rising order."""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence


def round_robin(ids: Sequence[int], last: int) -> int:
    """Return the id after `last`, which need not be present any more."""
    return ids[bisect.bisect_right(ids, last) % len(ids)]


def at_random(ids: Sequence[int], draw: Callable[[int], int]) -> int:
    """Return any id; `draw(n)` returns a random number below `n`."""
    return ids[draw(len(ids))]


def candidates(
    ids: Sequence[int], down_until: Mapping[int, float], now: float, tried: Collection[int]
) -> Sequence[int]:
    """Return the ids that are not tried yet and not known to be down; if all the rest are down, those."""
    if not tried and not down_until:
        return ids
    untried = [i for i in ids if i not in tried]
    return [i for i in untried if down_until.get(i, now) <= now] or untried
