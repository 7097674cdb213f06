"""Which worker probably holds which blocks, guessed from where requests were sent: for workers that tell no KV events.

    index.record(worker, sequence_hashes, now)      a request was sent there: it will hold these blocks
    index.expire(now)                               before `find`
    index.find(sequence_hashes)

A guess ends `ttl_s` after it was last recorded (policy `ttl`), or only when room ends (policy `lru`). Beyond
`max_guesses` those that were recorded longest ago are dropped until `prune_ratio` of the room is used, a bounded
number at a time, so that no request waits for a large cleaning. Defaults are those of Dynamo (`--router-ttl-secs`,
`--router-max-tree-size`, `--router-prune-target-ratio`).

Each worker's guesses stand in one dictionary in the order of their last use: what is used again moves to its end, and
dropping begins at the front. To look for the front costs more the more was dropped there, so time counts in whole
seconds, rounded up: the front is looked for once a second at most.
"""

import heapq
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Literal

from dynamo.protocols import kv_events
from dynamo.router import api, prefix_index

Policy = Literal["ttl", "lru"]
_LEAST_DROPPED = 1024  # at a time: walking over what was dropped before costs, too
_DEVICE = kv_events.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproxSettings:
    """How long to believe."""

    policy: Policy = "ttl"
    ttl_s: float = 120.0
    max_guesses: int = 1 << 20  # a block at a worker is one
    prune_ratio: float = 0.8


class ApproxIndex:
    """An `api.Index`. Mutable; one thread or loop owns it. Time is passed in, in seconds, and never goes back."""

    def __init__(self, settings: ApproxSettings | None = None) -> None:
        self._settings = settings or ApproxSettings()
        self._index = prefix_index.PrefixIndex(2 * self._settings.max_guesses)
        self._used_at: dict[api.Worker, dict[int, int]] = {}  # used longest ago first
        self._due_at: dict[api.Worker, float] = {}  # before, none of its guesses expires
        self._is_pruning = False
        self.num_guesses = 0

    def find(self, sequence_hashes: Sequence[int]) -> api.OverlapScores:
        return self._index.find(sequence_hashes)

    def record(self, worker: api.Worker, sequence_hashes: Sequence[int], now: float) -> None:
        """A request with these blocks was sent to `worker`."""
        if not sequence_hashes:
            return
        second = math.ceil(now)
        used_at = self._used_at.setdefault(worker, {})
        before = len(used_at)
        if before:  # out of their places, so that they come to the end
            deque(map(used_at.pop, sequence_hashes, repeat(second)), maxlen=0)
        used_at.update(dict.fromkeys(sequence_hashes[::-1], second))  # tails are dropped first
        self.num_guesses += len(used_at) - before
        self._due_at.setdefault(worker, second + self._settings.ttl_s)
        self._index.hold(worker, _DEVICE, sequence_hashes)
        self._prune(2 * len(sequence_hashes))

    def expire(self, now: float) -> None:
        """Drop the guesses that are too old at `now`."""
        if self._settings.policy == "lru":
            return
        for worker in [worker for worker, due_at in self._due_at.items() if due_at <= now]:
            self._expire(worker, now - self._settings.ttl_s)

    def remove_worker(self, worker: api.Worker) -> None:
        self.num_guesses -= len(self._used_at.pop(worker, ()))
        self._due_at.pop(worker, None)
        self._index.remove_worker(worker)

    def _expire(self, worker: api.Worker, newest: float) -> None:
        """Drop what this worker was last sent at `newest` or before."""
        old = []
        for name, second in self._used_at[worker].items():
            if second > newest:
                self._due_at[worker] = second + self._settings.ttl_s
                break
            old.append(name)
        self._drop(worker, old)

    def _prune(self, at_least: int) -> None:
        target = int(self._settings.max_guesses * self._settings.prune_ratio)
        if self.num_guesses > self._settings.max_guesses:
            self._is_pruning = True
        if not self._is_pruning:
            return
        most = min(self.num_guesses - target, max(at_least, _LEAST_DROPPED))
        by_age = heapq.merge(*map(self._by_age, self._used_at), key=operator.itemgetter(0))
        victims: dict[api.Worker, list[int]] = {}
        for _, worker, name in islice(by_age, most):
            victims.setdefault(worker, []).append(name)
        for worker, names in victims.items():
            self._drop(worker, names)
        self._is_pruning = self.num_guesses > target

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
        self._index.drop(worker, _DEVICE, names)
