"""The simplest worker that tells routers apart: one prompt after the other, so many tokens a second, an LRU cache.

No batching, no decoding: a request ends with its first token. Its blocks can be reused when its prompt is computed. The
cache touches a prompt from its last block to its first, so that tails are evicted before heads.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from dynamo.simulate.worker import Change, Progress
from dynamo.simulate.workload import Arrival


class FcfsWorker:
    """Mutable. `num_blocks` 0: the cache has no end."""

    def __init__(self, *, tokens_per_s: float, num_blocks: int, block_size: int) -> None:
        self.next_time = math.inf
        self._rate = tokens_per_s
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._queue: deque[tuple[str, Arrival]] = deque()
        self._cache: OrderedDict[int, None] = OrderedDict()  # touched longest ago first
        self._num_cached = 0  # tokens, of the request that is being computed

    def submit(self, request_id: str, arrival: Arrival, now: float) -> None:
        """Compute it at once, or after those that came before."""
        self._queue.append((request_id, arrival))
        if len(self._queue) == 1:
            self._start(now)

    def advance(self, now: float) -> Progress:
        """The first of the queue is done."""
        request_id, arrival = self._queue.popleft()
        progress = Progress(
            first_outputs=[(request_id, self._num_cached)],
            ended=[request_id],
            changes=[Change(True, arrival.names), Change(False, self._touch(arrival.names))],
        )
        self.next_time = math.inf
        if self._queue:
            self._start(now)
        return progress

    def _start(self, now: float) -> None:
        _, arrival = self._queue[0]
        num_found = 0
        while num_found < len(arrival.names) and arrival.names[num_found] in self._cache:
            num_found += 1
        self._num_cached = min(num_found * self._block_size, arrival.num_tokens)
        self.next_time = now + (arrival.num_tokens - self._num_cached) / self._rate

    def _touch(self, names: Sequence[int]) -> list[int]:
        cache = self._cache
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        num_over = len(cache) - self._num_blocks if self._num_blocks else 0
        return [cache.popitem(last=False)[0] for _ in range(num_over)]
