"""How hard each worker's cache is pressed: new tokens that were sent there, the older the less.

A cache that takes in twice as much forgets twice as soon. Where all caches turn over equally fast, they behave like one
large cache with one order of eviction; so what is new anyway had better go where little that is new has gone of late.

"Of late" is counted in tokens, not in seconds: an insertion counts 1/e after all caches together could have been
filled once more. Instead of ageing all figures at every insertion, later insertions weigh more.
"""

import math
from collections.abc import Mapping

from dynamo.router.api import Worker
from dynamo.router.load import Load

_ASSUMED_CAPACITY = 200_000  # tokens, of a worker that does not tell
_LARGEST_WEIGHT = 1e12


class Pressure:
    """Writes `inserted` of the loads. Only ratios between them mean anything."""

    def __init__(self, loads: Mapping[Worker, Load]) -> None:
        self._loads = loads
        self._weight = 1.0
        self._horizon = float(_ASSUMED_CAPACITY)

    def resize(self, *, block_size: int) -> None:
        """Workers came or went."""
        sizes = (load.capacity.total_blocks * block_size for load in self._loads.values())
        self._horizon = float(sum(size or _ASSUMED_CAPACITY for size in sizes)) or _ASSUMED_CAPACITY

    def insert(self, load: Load, num_tokens: int) -> None:
        """So many tokens that it does not hold yet were sent to a worker."""
        load.inserted += num_tokens * self._weight
        self._weight *= math.exp(num_tokens / self._horizon)
        if self._weight > _LARGEST_WEIGHT:
            self._rescale()

    def _rescale(self) -> None:
        for load in self._loads.values():
            load.inserted /= self._weight
        self._weight = 1.0
