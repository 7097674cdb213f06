"""The approximate index of cached blocks, for workers without KV events: guessed from where prompts were sent.

    index.record(worker, sequence_hashes, now)      a request was sent there: the worker will cache these blocks
    index.expire(now)                               before `find_matches`
    index.find_matches(sequence_hashes)

A guess ends `ttl_s` seconds after it was last recorded (cache policy `ttl`), or only when room ends (`lru`). Beyond
`max_guesses` those recorded longest ago are dropped until `prune_ratio` of the room is used, a bounded number at a
time, so that no request waits for a large cleaning. Defaults are those of Dynamo (`--router-ttl-secs`,
`--router-max-tree-size`, `--router-prune-target-ratio`).

Each worker's guesses stand in one dictionary in the order of their last use: a guess that is used again moves to the
end, and dropping begins at the front. To find the front costs more the more was dropped there, so time counts in whole
seconds, rounded up: the front is looked for once a second at most.
"""

import heapq
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Literal

from dynamo.protocols import kv_events
from dynamo.router import api, prefix_index

_MIN_PRUNED = 1024  # guesses at a time: walking over what was dropped before has a cost, too


class ApproxIndex:
    """An `api.Index`. Mutable; one event loop owns it. Time is passed in, in seconds, and never goes back."""

    def __init__(
        self,
        *,
        policy: Literal["ttl", "lru"] = "ttl",
        ttl_s: float = 120.0,
        max_guesses: int = 1 << 20,
        prune_ratio: float = 0.8,
    ) -> None:
        """A block at a worker is one guess."""
        self._ttl_s = ttl_s if policy == "ttl" else math.inf
        self._max_guesses = max_guesses
        self._target = int(max_guesses * prune_ratio)
        self._index = prefix_index.PrefixIndex(2 * max_guesses)
        self._used_at: dict[api.Worker, dict[int, int]] = {}  # used longest ago first
        self._expires_at: dict[api.Worker, float] = {}  # none of its guesses expires before
        self._is_pruning = False
        self.num_guesses = 0

    def find_matches(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        return self._index.find_matches(sequence_hashes)

    def record(self, worker: api.Worker, sequence_hashes: Sequence[int], now: float) -> None:
        """Record that a request with these blocks was sent to `worker`."""
        if not sequence_hashes:
            return
        second = math.ceil(now)
        used_at = self._used_at.setdefault(worker, {})
        num_before = len(used_at)
        if num_before:  # removed from their places, so that they come to the end
            deque(map(used_at.pop, sequence_hashes, repeat(second)), maxlen=0)
        used_at.update(dict.fromkeys(sequence_hashes[::-1], second))  # tails are dropped first
        self.num_guesses += len(used_at) - num_before
        self._expires_at.setdefault(worker, second + self._ttl_s)
        self._index.add_blocks(worker, kv_events.DEVICE, sequence_hashes)
        self._prune(2 * len(sequence_hashes))

    def expire(self, now: float) -> None:
        """Drop the guesses that are too old at `now`."""
        newest_expired = now - self._ttl_s
        for worker in [worker for worker, due in self._expires_at.items() if due <= now]:
            expired = []
            for name, second in self._used_at[worker].items():
                if second > newest_expired:
                    self._expires_at[worker] = second + self._ttl_s
                    break
                expired.append(name)
            self._drop(worker, expired)

    def remove_worker(self, worker: api.Worker) -> None:
        self.num_guesses -= len(self._used_at.pop(worker, ()))
        self._expires_at.pop(worker, None)
        self._index.remove_worker(worker)

    def _prune(self, min_dropped: int) -> None:
        if self.num_guesses > self._max_guesses:
            self._is_pruning = True
        if not self._is_pruning:
            return
        num_dropped = min(self.num_guesses - self._target, max(min_dropped, _MIN_PRUNED))
        by_age = heapq.merge(*map(self._by_age, self._used_at), key=operator.itemgetter(0))
        names_by_worker: dict[api.Worker, list[int]] = {}
        for _, worker, name in islice(by_age, num_dropped):
            names_by_worker.setdefault(worker, []).append(name)
        for worker, names in names_by_worker.items():
            self._drop(worker, names)
        self._is_pruning = self.num_guesses > self._target

    def _by_age(self, worker: api.Worker) -> Iterator[tuple[int, api.Worker, int]]:
        return ((second, worker, name) for name, second in self._used_at[worker].items())

    def _drop(self, worker: api.Worker, names: list[int]) -> None:
        used_at = self._used_at[worker]
        if len(names) == len(used_at):
            self.remove_worker(worker)
            return
        for name in names:
            del used_at[name]
        self.num_guesses -= len(names)
        self._index.remove_blocks(worker, kv_events.DEVICE, names)
