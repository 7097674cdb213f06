"""Simulated workers: the seam, and two engines. Times are seconds of virtual time, and never go back.

`FcfsWorker` is the simplest worker that tells routers apart: it computes one prompt after the other at a constant rate,
without batching or decode, so a request ends with its first token. Its LRU cache touches a prompt from its last block
to its first, so that tails are evicted before heads.

`BatchWorker` is the mock engine itself (`engine.mock`): its scheduler, memory, tiers and timing. Prompts are made of
tokens that stand for the names of their blocks, so that the engine hashes and finds them as it does those of real ones.
"""  # decider

import heapq
import itertools
import math
import typing
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dynamo.base import clock as clocks
from dynamo.engine import api
from dynamo.engine.mock import answers, batch, memory, timing
from dynamo.protocols import blocks, generate, kv_events
from dynamo.router import worker_load
from dynamo.simulate.workload import SimulatedRequest


class CacheChange(NamedTuple):
    """Blocks that were stored in a cache or removed from it; consecutive ones of a chain, in its order."""

    is_stored: bool
    names: Sequence[int]
    tier: kv_events.Tier = kv_events.DEVICE


@dataclass(slots=True)
class WorkerStepResult:
    """The results of one step of a worker."""

    first_outputs: list[tuple[str, int]] = field(default_factory=list)  # id, cached prompt tokens
    ended: list[str] = field(default_factory=list)
    changes: list[CacheChange] = field(default_factory=list)  # in order


class SimulatedWorker(Protocol):
    """The engine of one simulated worker."""

    def submit(self, request_id: str, arrival: SimulatedRequest, now: float) -> None:
        """Queue a request; an idle worker begins it at once."""

    @property
    def next_time(self) -> float:
        """Return the time at which the current step ends; infinity if the worker is idle."""

    def advance(self, now: float) -> WorkerStepResult:
        """End the step at `next_time`, and begin the next one."""


class FcfsWorker:
    """A worker that computes prompts one after the other. `num_blocks` 0: the cache is unlimited."""

    def __init__(self, *, tokens_per_s: float, num_blocks: int, block_size: int) -> None:
        self.next_time = math.inf
        self._rate = tokens_per_s
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._queue: deque[tuple[str, SimulatedRequest]] = deque()
        self._cache: OrderedDict[int, None] = OrderedDict()  # touched longest ago first
        self._num_cached = 0  # tokens of the request that is being computed

    def submit(self, request_id: str, arrival: SimulatedRequest, now: float) -> None:
        self._queue.append((request_id, arrival))
        if len(self._queue) == 1:
            self._start(now)

    def advance(self, now: float) -> WorkerStepResult:
        """End the first request of the queue, and begin the next one."""
        request_id, arrival = self._queue.popleft()
        for name in reversed(arrival.names):
            self._cache[name] = None
            self._cache.move_to_end(name)
        num_over = len(self._cache) - self._num_blocks if self._num_blocks else 0
        evicted = [self._cache.popitem(last=False)[0] for _ in range(num_over)]
        result = WorkerStepResult(
            first_outputs=[(request_id, self._num_cached)],
            ended=[request_id],
            changes=[CacheChange(True, arrival.names), CacheChange(False, evicted)],
        )
        self.next_time = math.inf
        if self._queue:
            self._start(now)
        return result

    def _start(self, now: float) -> None:
        _, arrival = self._queue[0]
        num_found = 0
        while num_found < len(arrival.names) and arrival.names[num_found] in self._cache:
            num_found += 1
        self._num_cached = min(num_found * self._block_size, arrival.num_tokens)
        self.next_time = now + (arrival.num_tokens - self._num_cached) / self._rate


_ANSWER_TOKENS = range(2**31, 2**31 + 64)  # never part of a prompt


class EventClock:
    """Virtual time that only a worker advances; `now` and `call_later` are those of `clock.Clock`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def now(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def call_later(self, duration_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call back when so much time has passed."""
        entry = (self._now + duration_s, next(self._numbers), callback, args)
        heapq.heappush(self._timers, entry)

    @property
    def next_time(self) -> float:
        """Return the time of the next call; infinity if there is none."""
        return self._timers[0][0] if self._timers else math.inf

    def advance_to(self, until: float) -> None:
        """Let time pass, and make the calls that are due."""
        while self.next_time <= until:
            self._now, _, callback, args = heapq.heappop(self._timers)
            callback(*args)
        self._now = max(self._now, until)


class StepTime(Protocol):
    """The time of a step, as `timing.Timing.step_s` tells it."""

    def __call__(
        self, *, num_prompt_tokens: int, num_decoding: int, active_share: float
    ) -> float: ...


MOCK_TIMING = timing.Timing()


class BatchWorker:
    """A worker that batches: the mock engine in virtual time. While copies of tiers run, it is not idle."""

    def __init__(
        self,
        capacity: worker_load.Capacity,
        *,
        block_size: int,
        step_s: StepTime = MOCK_TIMING.step_s,
        repeated_cost: float = 0.0,
        tiers: memory.SimulatedTiersConfig | None = None,
    ) -> None:
        """`repeated_cost`: what a shared token costs each further sequence, as a share of a token of its own."""
        self.next_time = math.inf
        self._step_s = step_s
        self._cost_of_repeated_block = (
            repeated_cost / capacity.total_blocks
        )  # in shares of the cache
        self._block_size = block_size
        self._clock = EventClock()
        self._name_by_hash: dict[int, int] = {}
        self._memory = memory.MockMemory(
            num_blocks=capacity.total_blocks, block_size=block_size, prefix_caching=True
        )
        limits = batch.BatchLimits(
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            context_length=capacity.total_blocks * block_size,
        )
        self._batch = batch.MockBatch(answers.TokenCycle(_ANSWER_TOKENS), self._memory, limits)
        self._has_step = False  # that ends at `next_time`
        self._copies: memory.SimulatedCopies | None = None
        if tiers is not None:
            cache = self._memory.tiers = memory.make_cache(self._memory.pool, tiers)
            clock = typing.cast(clocks.Clock, self._clock)
            self._copies = memory.SimulatedCopies(cache, tiers, clock, self._batch.end_tier_copy)

    @property
    def has_work(self) -> bool:
        """Return True while a request is open."""
        return self._batch.has_work

    def submit(self, request_id: str, arrival: SimulatedRequest, now: float) -> None:
        """Queue a request for the next step; an idle worker begins one at once."""
        names = [blocks.pack((name,)) * self._block_size for name in arrival.names]
        packed = b"".join(names)[: arrival.num_tokens * blocks.TOKEN_BYTES]
        hashes = blocks.sequence_hashes(blocks.local_hashes(packed, self._block_size))
        self._name_by_hash.update(zip(hashes, arrival.names, strict=False))
        self.queue(request_id, packed, arrival.num_output)
        if not self._has_step:
            self._clock.advance_to(now)
            self._begin()

    def queue(self, request_id: str, packed: bytes, num_output: int) -> None:
        """Queue a request with these packed tokens as prompt; the next `step` begins it."""
        stop = generate.StopConditions(max_tokens=num_output)
        self._batch.submit(
            generate.Request(id=request_id, model="", token_ids=packed, stop_conditions=stop)
        )

    def advance(self, now: float) -> WorkerStepResult:
        result = WorkerStepResult()
        for request_id, output in self.step(now):
            if output.cached_tokens is not None:
                result.first_outputs.append((request_id, output.cached_tokens))
            if output.finish_reason is not None:
                result.ended.append(request_id)
        result.changes += self._translate(self._batch.take_events())
        return result

    def step(self, now: float) -> Sequence[api.EngineOutput]:
        """Return the outputs of the step that ends now, if one does, and begin the next one, or wait for a copy."""
        self._clock.advance_to(now)
        outputs = self._batch.commit() if self._has_step else ()
        self._begin()
        return outputs

    def _begin(self) -> None:
        plan = self._batch.schedule()
        if self._copies is not None:
            self._copies.begin(lambda: None)
        self._has_step = not plan.is_empty
        self.next_time = self._clock.next_time
        if self._has_step:
            active_share = plan.active_share
            if self._cost_of_repeated_block:
                active_share += self._cost_of_repeated_block * self._batch.num_repeated_blocks
            seconds = self._step_s(
                num_prompt_tokens=plan.num_prompt_tokens,
                num_decoding=plan.num_decoding,
                active_share=active_share,
            )
            self.next_time = self._clock.now() + seconds
            if self._copies is not None:
                self._copies.record_step(plan.num_prompt_tokens + plan.num_decoding, seconds)

    def _translate(self, events: Sequence[kv_events.KvEvent]) -> Iterator[CacheChange]:
        """Translate KV events to the workload's block names; blocks of answers have none, and are left out."""
        for event in events:
            if isinstance(event, kv_events.Cleared):
                continue
            is_stored = isinstance(event, kv_events.Stored)
            hashes = (
                [block.block_hash for block in event.blocks]
                if isinstance(event, kv_events.Stored)
                else event.block_hashes
            )
            names = [self._name_by_hash[h] for h in hashes if h in self._name_by_hash]
            yield CacheChange(is_stored, names, event.tier)
