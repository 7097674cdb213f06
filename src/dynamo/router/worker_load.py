"""What the router believes a worker is doing: predicted from what was sent there and what came back.

Load reports come late (a second is long) and say nothing of requests on their way; these figures are there at once.

How hard each worker's cache is pressed: new tokens that were sent there, the older the less.

A cache that takes in twice as much forgets twice as soon. Where all caches turn over equally fast, they behave like one
large cache with one order of eviction; so what is new anyway had better go where little that is new has gone of late.

"Of late" is counted in tokens, not in seconds: an insertion counts 1/e after all caches together could have been
filled once more. Instead of ageing all figures at every insertion, later insertions weigh more.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

_PRIOR_TOKENS_PER_S = 10_000.0
_MEMORY = 0.98  # what an observation still counts after the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a worker says of itself in its model card; 0: unknown, or no limit."""

    total_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 8192


class Pace:
    """How fast workers compute prompts: tokens that were computed over the time that they took, lately.

    One for all workers: they serve the same model, and what one of them was slow at, others will be too.
    """

    def __init__(self) -> None:
        self.measured = 0.0  # tokens per second; 0: nothing is known yet
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """As measured, or else a guess."""
        return self.measured or _PRIOR_TOKENS_PER_S

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A prompt was computed; 0 seconds if it came in one step with the one before."""
        self._num_tokens = self._num_tokens * _MEMORY + num_tokens
        self._seconds = self._seconds * _MEMORY + seconds
        if self._num_tokens and self._seconds:
            self.measured = self._num_tokens / self._seconds


@dataclass(slots=True)
class Load:
    """One worker. `active` counts, everybody else reads."""

    capacity: Capacity
    pace: Pace
    num_requests: int = 0
    active_blocks: int = 0  # distinct blocks of the requests in flight
    prefill_tokens: int = 0  # prompt tokens to compute, of the requests that have not answered yet
    reserved_tokens: float = (
        0.0  # the same, of requests in the router's queue that wait for this worker
    )
    inserted: float = 0.0  # tokens that were new to its cache, lately (`pressure`)
    waiting: dict[str, int] = field(default_factory=dict)  # request -> tokens to compute, in order
    head_since: float = 0.0  # when the first of `waiting` began to be computed

    def backlog(self, now: float) -> float:
        """Prompt tokens that it has still to compute before it comes to a new one."""
        if not self.prefill_tokens:
            return self.reserved_tokens
        done = (now - self.head_since) * self.pace.measured
        return (
            self.prefill_tokens
            - min(done, next(iter(self.waiting.values())))
            + self.reserved_tokens
        )

    def enter(self, request_id: str, num_tokens: int, now: float) -> None:
        """A prompt of which this much has to be computed was sent there."""
        if not self.waiting:
            self.head_since = now
        self.waiting[request_id] = num_tokens
        self.prefill_tokens += num_tokens

    def leave(self, request_id: str, now: float) -> None:
        """The prompt is computed, or given up. Not an error if it was before."""
        num_tokens = self.waiting.pop(request_id, None)
        if num_tokens is None:
            return
        self.prefill_tokens -= num_tokens
        self.head_since = now

    def share_in_use(self, num_blocks: int) -> float | None:
        """Of all its blocks, once a request has so many more; None if it does not say how many there are."""
        total = self.capacity.total_blocks
        return (self.active_blocks + num_blocks) / total if total else None

    def has_room(self, num_blocks: int, max_backlog: float, now: float) -> bool:
        """Whether a request that needs so many more blocks would soon be computed there."""
        if not self.num_requests:
            return True
        capacity = self.capacity
        return (
            self.backlog(now) - self.reserved_tokens
            <= max_backlog * capacity.max_num_batched_tokens
            and (not capacity.max_num_seqs or self.num_requests < capacity.max_num_seqs)
            and (
                not capacity.total_blocks
                or self.active_blocks + num_blocks <= capacity.total_blocks
            )
        )


_ASSUMED_CAPACITY = 200_000  # tokens, of a worker that does not tell
_LARGEST_WEIGHT = 1e12


class CachePressure:
    """Writes `inserted` of the loads. Only ratios between them mean anything."""

    def __init__(self, loads: Collection[Load]) -> None:
        self._loads = loads
        self._weight = 1.0
        self._horizon = float(_ASSUMED_CAPACITY)

    def resize(self, *, block_size: int) -> None:
        """Workers came or went."""
        sizes = (load.capacity.total_blocks * block_size for load in self._loads)
        self._horizon = float(sum(size or _ASSUMED_CAPACITY for size in sizes)) or _ASSUMED_CAPACITY

    def insert(self, load: Load, num_tokens: int) -> None:
        """So many tokens that it does not hold yet were sent to a worker."""
        load.inserted += num_tokens * self._weight
        self._weight *= math.exp(num_tokens / self._horizon)
        if self._weight > _LARGEST_WEIGHT:
            self._rescale()

    def _rescale(self) -> None:
        for load in self._loads:
            load.inserted /= self._weight
        self._weight = 1.0
