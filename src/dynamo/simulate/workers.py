"""Simulated workers: the seam, and three engines. Times are seconds of virtual time, and never go back.

`FcfsWorker` is the simplest worker that tells routers apart: it computes one prompt after the other at a constant rate,
without batching or decode, so a request ends with its first token. Its LRU cache touches a prompt from its last block
to its first, so that tails are evicted before heads.

`BatchWorker` is the mock engine itself (`engine.mock`): its scheduler, memory and timing. Prompts are made of tokens
that stand for the names of their blocks, so that the engine hashes and finds them as it does those of real ones.

`GpuWorker` is a worker on a group of GPUs, with prefill and decode told apart, for the comparison of pools (`disagg`).
Each iteration gives every running sequence a token, and fills the rest of its budget with prompts, first come first
served. A sequence is admitted when the whole of its prompt and answer has room, so nothing is preempted. Its time is a
roofline, plus the cost of tensor parallelism:

    overhead + max(weights read, arithmetic) + keys and values read + all-reduces

Weights are read once for whatever is computed, so decode waits for memory and a prompt for arithmetic. Two all-reduces
a layer each cost their latency, and their bytes over the links: for a prompt on eight GPUs that is nearly as much time
as the arithmetic itself, which is why prompts are better computed by GPUs that each hold the whole model.

The default figures are those of H100 SXM and a Llama of 70 billion parameters in FP8; how much of the peaks is reached
is an assumption, and flags of `simulate disagg` change it. Latencies are seconds, rates are per second.
"""

import heapq
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
            cycle := answers.TokenCycle(_ANSWER_TOKENS),
            num_blocks=capacity.total_blocks,
            block_size=block_size,
            prefix_caching=True,
        )
        limits = batch.BatchLimits(
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            context_length=capacity.total_blocks * block_size,
        )
        self._batch = batch.MockBatch(cycle, self._memory, limits)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The usable speed and memory of one GPU."""

    flops: float = 0.45 * 1979e12  # FP8, dense; the share that long prompts reach
    bytes_per_s: float = 0.75 * 3.35e12  # of its own memory
    memory_bytes: float = 0.95 * 80e9
    link_bytes_per_s: float = 300e9  # of an all-reduce over NVLink, as NCCL counts it
    all_reduce_s: float = 10e-6  # latency of an all-reduce of next to no bytes
    overhead_s: float = 3e-3  # of an iteration: scheduling, launching, sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The size of a dense transformer."""

    num_parameters: float = 70e9
    weight_bytes: float = 70e9
    num_layers: int = 80
    hidden_size: int = 8192
    kv_bytes: float = (
        327_680.0  # keys and values of a token: 80 layers of 8 heads of 128 in 16 bits
    )
    activation_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGroup:
    """GPUs that hold a model together (tensor parallelism)."""

    gpu: Gpu
    model: ModelShape
    size: int

    @property
    def num_kv_tokens(self) -> int:
        """Return the tokens of KV cache that fit beside the weights; 0 or less: the model does not fit."""
        free = self.size * self.gpu.memory_bytes - self.model.weight_bytes
        return int(free // self.model.kv_bytes)

    def prompt_s(self, start: int, end: int) -> float:
        """Return the seconds of arithmetic for the tokens `start` to `end` of a prompt: linear layers and attention."""
        linear = 2 * self.model.num_parameters * (end - start)
        attention = 2 * self.model.num_layers * self.model.hidden_size * (end**2 - start**2)
        return (linear + attention) / (self.size * self.gpu.flops)

    def iteration_s(
        self, *, prompts_s: float, num_prompt_tokens: int, num_decoding: int, num_read: int
    ) -> float:
        """Return the seconds of an iteration.

        `prompts_s` is the sum of `prompt_s`, `num_read` the number of tokens of which decode reads keys and values.
        """
        bandwidth = self.size * self.gpu.bytes_per_s
        decoding_s = 2 * self.model.num_parameters * num_decoding / (self.size * self.gpu.flops)
        all_reduces_s = 0.0
        if self.size > 1:
            num_tokens = num_prompt_tokens + num_decoding
            num_bytes = num_tokens * self.model.hidden_size * self.model.activation_bytes
            over_links = 2 * (self.size - 1) / self.size * num_bytes / self.gpu.link_bytes_per_s
            all_reduces_s = 2 * self.model.num_layers * (self.gpu.all_reduce_s + over_links)
        return (
            self.gpu.overhead_s
            + max(self.model.weight_bytes / bandwidth, prompts_s + decoding_s)
            + num_read * self.model.kv_bytes / bandwidth
            + all_reduces_s
        )


@dataclass(slots=True, kw_only=True)
class Job:
    """One request and its progress; times are seconds of the simulation."""

    num_prompt: int
    num_output: int
    begun_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_computed: int = 0  # of the prompt
    num_written: int = 0  # of the answer; brought up to date when the job joins or leaves a worker


@dataclass(slots=True)
class IterationResult:
    """The jobs that completed their prefill or their answer in an iteration."""

    prefilled: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class GpuWorker:
    """One worker. With `is_prefill_only`, a job leaves it with its first token."""

    def __init__(
        self,
        group: GpuGroup,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        is_prefill_only: bool = False,
    ) -> None:
        self.next_time = math.inf
        self._group = group
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_tokens
        self._is_prefill_only = is_prefill_only
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        # a heap: iteration that ends the answer, order of joining, iteration before the first token, job
        self._decoding: list[tuple[int, int, int, Job]] = []
        self._num_read = 0  # tokens of which a decode step reads keys and values
        self._num_iterations = self._num_joined = 0
        self._chunks: list[tuple[Job, int]] = []  # of the iteration that runs
        self._num_free = group.num_kv_tokens

    @property
    def num_waiting(self) -> int:
        """Return the number of prompts of which nothing is computed yet."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Return the number of jobs that have not left the worker."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, job: Job, now: float) -> None:
        """Queue a job, the prompt of which may be computed already; an idle worker begins it at once."""
        self._waiting.append(job)
        if self.next_time == math.inf:
            self._begin(now)

    def advance(self, now: float) -> IterationResult:
        """End the iteration at `next_time`, and begin the next one."""
        result = IterationResult()
        self._num_iterations += 1
        self._num_read += len(self._decoding)
        for job, num_tokens in self._chunks:
            job.num_computed += num_tokens
            if job.num_computed == job.num_prompt:
                self._prefilling.popleft()
                job.first_token_at, job.num_written = now, 1
                result.prefilled.append(job)
                if self._is_prefill_only:
                    self._num_free += self._tokens_needed(job)
                else:
                    self._decode(job)
        while self._decoding and self._decoding[0][0] <= self._num_iterations:
            _, _, before, job = heapq.heappop(self._decoding)
            job.num_written, job.ended_at = self._num_iterations - before, now
            self._num_read -= job.num_prompt + job.num_written
            self._num_free += self._tokens_needed(job)
            result.ended.append(job)
        self._begin(now)
        return result

    def _decode(self, job: Job) -> None:
        before = self._num_iterations - job.num_written
        self._num_joined += 1
        self._num_read += job.num_prompt + job.num_written
        heapq.heappush(self._decoding, (before + job.num_output, self._num_joined, before, job))

    def _begin(self, now: float) -> None:
        self._admit_jobs()
        self._chunks = []
        num_left = self._max_num_tokens - len(self._decoding)
        for job in self._prefilling:
            num_tokens = min(num_left, job.num_prompt - job.num_computed)
            if num_tokens <= 0:
                break
            self._chunks.append((job, num_tokens))
            num_left -= num_tokens
        self.next_time = math.inf
        if not self._chunks and not self._decoding:
            return
        self.next_time = now + self._group.iteration_s(
            prompts_s=sum(
                self._group.prompt_s(job.num_computed, job.num_computed + num)
                for job, num in self._chunks
            ),
            num_prompt_tokens=sum(num for _, num in self._chunks),
            num_decoding=len(self._decoding),
            num_read=self._num_read,
        )

    def _admit_jobs(self) -> None:
        num_running = len(self._prefilling) + len(self._decoding)
        while self._waiting and num_running < self._max_num_seqs:
            if (need := self._tokens_needed(self._waiting[0])) > self._num_free:
                return
            job = self._waiting.popleft()
            self._num_free -= need
            num_running += 1
            if job.num_computed == job.num_prompt:
                self._decode(job)
            else:
                self._prefilling.append(job)

    def _tokens_needed(self, job: Job) -> int:
        return job.num_prompt + (0 if self._is_prefill_only else job.num_output)
