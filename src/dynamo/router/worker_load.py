"""The load of each worker as the router predicts it: from what it sent there and what came back.

Load reports of workers come late (a second is long) and know nothing of requests on their way; these figures are there
at once.

*Cache pressure.* A cache that takes in twice as many tokens forgets twice as soon. Where all caches turn over equally
fast, they behave like one large cache with one order of eviction; so new content should go where little new content
went recently. "Recently" is counted in tokens, not in seconds: an insertion counts 1/e once all caches together could
have been filled again. Instead of ageing all figures at every insertion, later insertions get a larger weight.
"""  # decider

import math
from collections.abc import Collection
from dataclasses import dataclass, field

_ASSUMED_TOKENS_PER_S = 10_000.0
_DECAY = 0.98  # the weight of an observation after the next one
_SLOPE_DECAY = 0.995
_LEAST_ANSWERS = 10
_LEAST_ANSWER_S = 0.02  # the times of shorter answers are those of event loops
_ERRORS_TAKEN_OFF = 1.5
_ASSUMED_CACHE_TOKENS = 200_000  # of a worker that does not publish its size
_MAX_INSERTION_WEIGHT = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The limits that a worker publishes in its model card; 0: unknown, or no limit."""

    total_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 8192


class PrefillSpeed:
    """The recent speed of prefill: computed prompt tokens over the seconds that they took.

    One for all workers: they serve the same model, so what was slow on one of them will be slow on the others.
    """

    def __init__(self) -> None:
        self.measured = 0.0  # tokens per second; 0: no observation yet
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the measured speed, or a guess while there is none."""
        return self.measured or _ASSUMED_TOKENS_PER_S

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a computed prompt; `seconds` is 0 if one step computed it together with the prompt before."""
        self._num_tokens = self._num_tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds
        if self._num_tokens and self._seconds:
            self.measured = self._num_tokens / self._seconds


class DecodeSlowdown:
    """How much longer answers take on a worker that holds more: the slope of their time over the KV tokens in use.

    A straight line through the recent answers, by least squares. Lengths of answers are not known in advance, so the
    slope is that of an answer of usual length. What may be noise does not count: the slope is taken lower than it
    seems by one and a half standard errors. One for all workers, as `PrefillSpeed`.
    """

    def __init__(self) -> None:
        self._count = self._sum_x = self._sum_y = 0.0
        self._sum_xx = self._sum_xy = self._sum_yy = 0.0

    def observe(self, seconds: float, active_tokens: float) -> None:
        """Add an answer that took `seconds` after its first token, with so many prompt tokens in use at its worker."""
        keep = _SLOPE_DECAY
        self._count = self._count * keep + 1
        self._sum_x = self._sum_x * keep + active_tokens
        self._sum_y = self._sum_y * keep + seconds
        self._sum_xx = self._sum_xx * keep + active_tokens * active_tokens
        self._sum_xy = self._sum_xy * keep + active_tokens * seconds
        self._sum_yy = self._sum_yy * keep + seconds * seconds

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds that each further token in use adds to an answer; 0 while there are few observations.

        At most the whole time over all tokens: an answer on an empty worker takes more than no time.
        """
        if self._count < _LEAST_ANSWERS or self._sum_y < _LEAST_ANSWER_S * self._count:
            return 0.0
        spread = self._sum_xx - self._sum_x**2 / self._count
        if spread <= 1e-6 * self._sum_x**2 / self._count:
            return 0.0
        common = self._sum_xy - self._sum_x * self._sum_y / self._count
        slope = common / spread
        unexplained = self._sum_yy - self._sum_y**2 / self._count - slope * common
        error = math.sqrt(max(0.0, unexplained) / (self._count - 2) / spread)
        return min(max(0.0, slope - _ERRORS_TAKEN_OFF * error), self._sum_y / self._sum_x)


@dataclass(slots=True)
class WorkerLoad:
    """The load of one worker. `active_sequences` updates it; all others only read."""

    capacity: Capacity
    prefill_speed: PrefillSpeed
    num_requests: int = 0
    active_blocks: int = 0  # distinct blocks of the requests in flight
    prefill_tokens: int = 0  # prompt tokens to compute, of requests without a first output
    reserved_tokens: float = 0.0  # prompt tokens of queued requests that wait for this worker
    inserted_tokens: float = 0.0  # new to its cache, weighted by recency (`CachePressure`)
    waiting: dict[str, int] = field(default_factory=dict)  # request -> tokens to compute, in order
    head_since: float = 0.0  # when the prefill of the first of `waiting` began
    decode_slowdown: DecodeSlowdown = field(default_factory=DecodeSlowdown)

    def backlog(self, now: float) -> float:
        """Return the prompt tokens that the worker still has to compute before a new prompt."""
        if not self.prefill_tokens:
            return self.reserved_tokens
        computed = (now - self.head_since) * self.prefill_speed.measured
        return (
            self.prefill_tokens
            - min(computed, next(iter(self.waiting.values())))
            + self.reserved_tokens
        )

    def add_prefill(self, request_id: str, num_tokens: int, now: float) -> None:
        """Add a prompt of which `num_tokens` have to be computed to the end of the worker's queue."""
        if not self.waiting:
            self.head_since = now
        self.waiting[request_id] = num_tokens
        self.prefill_tokens += num_tokens

    def remove_prefill(self, request_id: str, now: float) -> None:
        """Remove a prompt that is computed or aborted. An unknown one is no error."""
        is_first = next(iter(self.waiting), None) == request_id
        self.prefill_tokens -= self.waiting.pop(request_id, 0)
        if is_first:
            self.head_since = now

    def share_in_use(self, num_blocks: int) -> float | None:
        """Return the share of the worker's blocks in use with `num_blocks` more; None if their total is unknown."""
        total = self.capacity.total_blocks
        return (self.active_blocks + num_blocks) / total if total else None

    def has_room(self, num_blocks: int, max_backlog: float, now: float) -> bool:
        """Return True if a request with `num_blocks` new blocks would be computed within `max_backlog` steps."""
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


class CachePressure:
    """Updates `inserted_tokens` of the loads. Only their ratios have a meaning."""

    def __init__(self, loads: Collection[WorkerLoad]) -> None:
        self._loads = loads
        self._weight = 1.0
        self._horizon = float(_ASSUMED_CACHE_TOKENS)

    def update_cache_size(self, *, block_size: int) -> None:
        """Recompute the total cache size in tokens, after workers came or went."""
        sizes = (load.capacity.total_blocks * block_size for load in self._loads)
        self._horizon = (
            float(sum(size or _ASSUMED_CACHE_TOKENS for size in sizes)) or _ASSUMED_CACHE_TOKENS
        )

    def insert(self, load: WorkerLoad, num_tokens: int) -> None:
        """Record `num_tokens` prompt tokens that were sent to a worker and are not in its cache."""
        load.inserted_tokens += num_tokens * self._weight
        self._weight *= math.exp(num_tokens / self._horizon)
        if self._weight > _MAX_INSERTION_WEIGHT:
            for each in self._loads:
                each.inserted_tokens /= self._weight
            self._weight = 1.0
