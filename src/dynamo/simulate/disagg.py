"""The comparison of aggregated and disaggregated pools of as many GPUs, with the same clients, in virtual time.

Each client sends its next request when the last has ended. A point of a pool's curve is the speed for a user (tokens a
second after the first) and the output of a GPU (tokens a second), with one number of clients. Curves are compared at
equal speed for the user, as the published figures are. `disagg.policy` decides which prompts go to a prefill worker, as
in a worker.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from dynamo.base import errors
from dynamo.disagg import policy
from dynamo.simulate.gpu_worker import GpuGroup, GpuWorker, Job

ALWAYS_REMOTE = policy.LocalPrefillLimits(max_local_prefill_length=0, max_prefill_queue_size=2**31)
_NUM_ROUNDS = 6  # requests of each client; the first and the last are not counted
_NUM_SPEEDS = 200  # at which the curves are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of workers. Without prefill workers it is aggregated."""

    name: str
    num_workers: int  # decode or aggregated workers
    group: GpuGroup
    num_prefill: int = 0
    prefill_group: GpuGroup | None = None
    limits: policy.LocalPrefillLimits = ALWAYS_REMOTE
    transfer_s: float = 0.0  # to copy the KV blocks of a prompt
    max_num_seqs: int = 256
    max_num_tokens: int = 2048

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of all workers."""
        prefill = self.prefill_group.size if self.prefill_group else 0
        return self.num_workers * self.group.size + self.num_prefill * prefill


class Point(NamedTuple):
    """The result for one number of clients. Rates are output tokens a second, times are seconds."""

    concurrency: int
    per_user: float
    per_gpu: float
    mean_ttft: float
    share_remote: float


def measure(pool: Pool, concurrency: int, *, num_prompt: int, num_output: int) -> Point:
    """Simulate `concurrency` clients of a pool. Raises ConfigError if a request does not fit into a worker."""
    run = _PoolRun(pool, num_prompt=num_prompt, num_output=num_output)
    jobs = run.serve(concurrency, num_jobs=concurrency * _NUM_ROUNDS)
    jobs.sort(key=lambda job: job.ended_at)
    counted = jobs[concurrency : len(jobs) - concurrency]
    span = counted[-1].ended_at - jobs[concurrency - 1].ended_at
    itl = fmean((job.ended_at - job.first_token_at) / (num_output - 1) for job in counted)
    return Point(
        concurrency=concurrency,
        per_user=1 / itl,
        per_gpu=len(counted) * num_output / span / pool.num_gpus,
        mean_ttft=fmean(job.first_token_at - job.begun_at for job in counted),
        share_remote=run.num_remote / len(jobs),
    )


class _PoolRun:
    def __init__(self, pool: Pool, *, num_prompt: int, num_output: int) -> None:
        self._pool, self._num_prompt, self._num_output = pool, num_prompt, num_output
        for group in filter(None, (pool.group, pool.prefill_group)):
            if group.num_kv_tokens < num_prompt + num_output:
                raise errors.ConfigError(
                    f"{pool.name}: a group of {group.size} GPUs has room for {max(0, group.num_kv_tokens)} tokens"
                    f" beside the model, expected {num_prompt + num_output}"
                )
        self._decoders = [self._make_worker(pool.group) for _ in range(pool.num_workers)]
        self._prefillers = [
            self._make_worker(pool.prefill_group, is_prefill_only=True)
            for _ in range(pool.num_prefill)
            if pool.prefill_group is not None
        ]
        self._turns = itertools.cycle(self._decoders)
        self._order = itertools.count()
        self._due: list[tuple[float, int, GpuWorker | Job]] = []
        self.num_remote = 0

    def serve(self, concurrency: int, *, num_jobs: int) -> list[Job]:
        """Run `num_jobs` jobs, `concurrency` at a time; return them."""
        ended_jobs: list[Job] = []
        for _ in range(concurrency):
            self._start_job(0.0)
        num_started = concurrency
        while self._due:
            now, _, due = heapq.heappop(self._due)
            ended = self._handle(due, now)
            for _ in ended[: max(0, num_jobs - num_started)]:
                self._start_job(now)
            num_started += len(ended)
            ended_jobs += ended
        return ended_jobs

    def _start_job(self, now: float) -> None:
        job = Job(num_prompt=self._num_prompt, num_output=self._num_output, begun_at=now)
        chosen = min(self._prefillers, key=lambda worker: worker.num_open, default=None)
        queue_size = None if chosen is None else chosen.num_waiting
        if chosen is not None and self._pool.limits.allow_remote(job.num_prompt, queue_size):
            self.num_remote += 1
            self._submit(chosen, job, now)
        else:
            self._submit(next(self._turns), job, now)

    def _handle(self, due: GpuWorker | Job, now: float) -> list[Job]:
        if isinstance(due, Job):  # its KV blocks have been copied
            self._submit(min(self._decoders, key=lambda worker: worker.num_open), due, now)
            return []
        result = due.advance(now)
        self._schedule_step(due)
        if due in self._prefillers:
            for job in result.prefilled:
                arrives_at = now + self._pool.transfer_s
                heapq.heappush(self._due, (arrives_at, next(self._order), job))
        return result.ended

    def _submit(self, worker: GpuWorker, job: Job, now: float) -> None:
        was_idle = worker.next_time == math.inf
        worker.submit(job, now)
        if was_idle:
            self._schedule_step(worker)

    def _schedule_step(self, worker: GpuWorker) -> None:
        if worker.next_time < math.inf:
            heapq.heappush(self._due, (worker.next_time, next(self._order), worker))

    def _make_worker(self, group: GpuGroup, *, is_prefill_only: bool = False) -> GpuWorker:
        return GpuWorker(
            group,
            max_num_seqs=self._pool.max_num_seqs,
            max_num_tokens=self._pool.max_num_tokens,
            is_prefill_only=is_prefill_only,
        )


class Ratio(NamedTuple):
    """The tokens per GPU of one pool over those of another, at one speed for the user."""

    per_user: float
    ratio: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both rates; the slowest for the user first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.per_user, p.per_gpu), reverse=True):
        if not best or point.per_gpu > best[-1].per_gpu:
            best.append(point)
    return best[::-1]


def compare(points: Sequence[Point], base: Sequence[Point]) -> list[Ratio]:
    """Return the ratios of two frontiers, up to the highest speed that both reach, interpolated between points.

    Below its slowest point a curve is constant: a pool that can serve users faster can also serve them more slowly.
    """
    curve, base_curve = frontier(points), frontier(base)
    low = min(curve[0].per_user, base_curve[0].per_user)
    high = min(curve[-1].per_user, base_curve[-1].per_user)
    speeds = [low + (high - low) * i / _NUM_SPEEDS for i in range(_NUM_SPEEDS + 1)]
    return [
        Ratio(speed, _output_at(curve, speed) / _output_at(base_curve, speed)) for speed in speeds
    ]


def winning_ranges(ratios: Sequence[Ratio]) -> list[tuple[float, float]]:
    """Return the ranges of speed in which the first pool is better."""
    groups = itertools.groupby(ratios, key=lambda each: each.ratio > 1)
    ranges = [[each.per_user for each in group] for wins, group in groups if wins]
    return [(speeds[0], speeds[-1]) for speeds in ranges]


def _output_at(curve: Sequence[Point], speed: float) -> float:
    if speed <= curve[0].per_user:
        return curve[0].per_gpu
    for low, high in itertools.pairwise(curve):
        if low.per_user <= speed <= high.per_user:
            share = (speed - low.per_user) / (high.per_user - low.per_user)
            return low.per_gpu + share * (high.per_gpu - low.per_gpu)
    return curve[-1].per_gpu
