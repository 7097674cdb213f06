"""Simulated workers: the seam, and two engines. Times are seconds of virtual time, and never go back.

`FcfsWorker` is the simplest worker that tells routers apart: it computes one prompt after the other at a constant rate,
without batching or decode, so a request ends with its first token. Its LRU cache touches a prompt from its last block
to its first, so that tails are evicted before heads.

`BatchWorker` is the mock engine itself (`engine.mock`): its scheduler, memory and timing. Prompts are made of tokens
that stand for the names of their blocks, so that the engine hashes and finds them as it does those of real ones.
"""  # decider

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dynamo.engine.mock import answers, batch, memory, timing
from dynamo.protocols import blocks, generate, kv_events
from dynamo.router import worker_load
from dynamo.simulate.workload import SimulatedRequest


class CacheChange(NamedTuple):
    """Blocks that were stored in a cache or removed from it; consecutive ones of a chain, in its order."""

    is_stored: bool
    names: Sequence[int]


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
        """Queue a request; an idle worker begins it at once."""
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


class BatchWorker:
    """A worker that batches: the mock engine in virtual time."""

    def __init__(
        self, capacity: worker_load.Capacity, *, block_size: int, speedup_ratio: float = 1.0
    ) -> None:
        self.next_time = math.inf
        self._timing = timing.Timing(speedup_ratio=speedup_ratio)
        self._block_size = block_size
        self._name_by_hash: dict[int, int] = {}
        self._memory = memory.MockMemory(
            num_blocks=capacity.total_blocks,
            block_size=block_size,
            prefix_caching=True,
        )
        limits = batch.BatchLimits(
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            context_length=capacity.total_blocks * block_size,
        )
        self._batch = batch.MockBatch(answers.TokenCycle(_ANSWER_TOKENS), self._memory, limits)

    def submit(self, request_id: str, arrival: SimulatedRequest, now: float) -> None:
        """Queue a request for the next step; an idle worker begins one at once."""
        names = [blocks.pack((name,)) * self._block_size for name in arrival.names]
        packed = b"".join(names)[: arrival.num_tokens * blocks.TOKEN_BYTES]
        hashes = blocks.sequence_hashes(blocks.local_hashes(packed, self._block_size))
        self._name_by_hash.update(zip(hashes, arrival.names, strict=False))
        self._batch.submit(
            generate.Request(
                id=request_id,
                model="",
                token_ids=packed,
                stop_conditions=generate.StopConditions(max_tokens=arrival.num_output),
            )
        )
        if self.next_time == math.inf:
            self._begin(now)

    def advance(self, now: float) -> WorkerStepResult:
        """End the step at `next_time`, and begin the next one."""
        result = WorkerStepResult()
        for request_id, output in self._batch.commit():
            if output.cached_tokens is not None:
                result.first_outputs.append((request_id, output.cached_tokens))
            if output.finish_reason is not None:
                result.ended.append(request_id)
        result.changes += self._translate(self._batch.take_events())
        self.next_time = math.inf
        if self._batch.has_work:
            self._begin(now)
        return result

    def _begin(self, now: float) -> None:
        plan = self._batch.schedule()
        self.next_time = now + self._timing.step_s(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_decoding=plan.num_decoding,
            active_share=plan.active_share,
        )

    def _translate(self, events: Sequence[kv_events.KvEvent]) -> Iterator[CacheChange]:
        """Translate KV events to the workload's block names; blocks of answers have none, and are left out."""
        for event in events:
            is_stored = isinstance(event, kv_events.Stored)
            hashes = (
                [block.block_hash for block in event.blocks]
                if isinstance(event, kv_events.Stored)
                else getattr(event, "block_hashes", ())
            )
            names = [self._name_by_hash[h] for h in hashes if h in self._name_by_hash]
            yield CacheChange(is_stored, names)
