"""Does it pay to compute prompts on GPUs of their own? Two pools of as many GPUs, the same clients, virtual time.

`--concurrency` clients ask one after the other, each for a new prompt. A point of the result is what a user gets
(tokens a second, after the first) against what a GPU gives (tokens a second); a pool's curve goes over the number of
clients. Curves are compared at equal speed for the user, as the published figures are. Whether a prompt goes to a
prefill worker is decided by `disagg.policy`, as in a worker.
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
from dynamo.simulate.hardware import Group
from dynamo.simulate.phase_worker import Job, PhaseWorker

ALWAYS_AWAY = policy.LocalPrefillLimits(max_local_prefill_length=0, max_prefill_queue_size=2**31)
_NUM_ROUNDS = 6  # requests of each client; the first and the last are not counted
_NUM_STEPS = 200  # at which the curves are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers, and how prompts are shared among them. Without prefill workers it is aggregated."""

    name: str
    num_workers: int  # that decode
    group: Group
    num_prefill: int = 0
    prefill_group: Group | None = None
    limits: policy.LocalPrefillLimits = ALWAYS_AWAY
    transfer_s: float = 0.0  # to move the keys and values of a prompt
    max_num_seqs: int = 256
    max_num_tokens: int = 2048

    @property
    def num_gpus(self) -> int:
        """In all."""
        prefill = self.prefill_group.size if self.prefill_group else 0
        return self.num_workers * self.group.size + self.num_prefill * prefill


class Point(NamedTuple):
    """One number of clients. Rates are tokens a second of the answers, times seconds."""

    concurrency: int
    per_user: float
    per_gpu: float
    mean_ttft: float
    share_away: float


def measure(pool: Pool, concurrency: int, *, num_prompt: int, num_output: int) -> Point:
    """Run so many clients over the pool. Raises ConfigError if a request does not fit into a worker."""
    run = _Run(pool, num_prompt=num_prompt, num_output=num_output)
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
        share_away=run.num_away / len(jobs),
    )


class _Run:
    def __init__(self, pool: Pool, *, num_prompt: int, num_output: int) -> None:
        self._pool, self._num_prompt, self._num_output = pool, num_prompt, num_output
        for group in filter(None, (pool.group, pool.prefill_group)):
            if group.num_kv_tokens < num_prompt + num_output:
                raise errors.ConfigError(
                    f"{pool.name}: a group of {group.size} GPUs has room for {max(0, group.num_kv_tokens)} tokens"
                    f" beside the model, expected {num_prompt + num_output}"
                )
        self._decoders = [self._worker(pool.group) for _ in range(pool.num_workers)]
        self._prefillers = [
            self._worker(pool.prefill_group, is_prefill_only=True)
            for _ in range(pool.num_prefill)
            if pool.prefill_group is not None
        ]
        self._turns = itertools.cycle(self._decoders)
        self._order = itertools.count()
        self._due: list[tuple[float, int, PhaseWorker | Job]] = []
        self.num_away = 0

    def serve(self, concurrency: int, *, num_jobs: int) -> list[Job]:
        """All of them, so many at once."""
        done: list[Job] = []
        for _ in range(concurrency):
            self._ask(0.0)
        num_asked = concurrency
        while self._due:
            now, _, what = heapq.heappop(self._due)
            ended = self._step(what, now)
            for _ in ended[: max(0, num_jobs - num_asked)]:
                self._ask(now)
            num_asked += len(ended)
            done += ended
        return done

    def _ask(self, now: float) -> None:
        job = Job(num_prompt=self._num_prompt, num_output=self._num_output, begun_at=now)
        chosen = min(self._prefillers, key=lambda worker: worker.num_open, default=None)
        queue_size = None if chosen is None else chosen.num_waiting
        if chosen is not None and self._pool.limits.allow_remote(job.num_prompt, queue_size):
            self.num_away += 1
            self._submit(chosen, job, now)
        else:
            self._submit(next(self._turns), job, now)

    def _step(self, what: PhaseWorker | Job, now: float) -> list[Job]:
        if isinstance(what, Job):  # its keys and values have arrived
            self._submit(min(self._decoders, key=lambda worker: worker.num_open), what, now)
            return []
        done = what.advance(now)
        self._expect(what)
        if what in self._prefillers:
            for job in done.prefilled:
                arrives = now + self._pool.transfer_s
                heapq.heappush(self._due, (arrives, next(self._order), job))
        return done.ended

    def _submit(self, worker: PhaseWorker, job: Job, now: float) -> None:
        was_idle = worker.next_time == math.inf
        worker.submit(job, now)
        if was_idle:
            self._expect(worker)

    def _expect(self, worker: PhaseWorker) -> None:
        if worker.next_time < math.inf:
            heapq.heappush(self._due, (worker.next_time, next(self._order), worker))

    def _worker(self, group: Group, *, is_prefill_only: bool = False) -> PhaseWorker:
        return PhaseWorker(
            group,
            max_num_seqs=self._pool.max_num_seqs,
            max_num_tokens=self._pool.max_num_tokens,
            is_prefill_only=is_prefill_only,
        )


class Ratio(NamedTuple):
    """At one speed for the user: tokens per GPU of one pool over those of another."""

    per_user: float
    ratio: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both; slowest for the user first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.per_user, p.per_gpu), reverse=True):
        if not best or point.per_gpu > best[-1].per_gpu:
            best.append(point)
    return best[::-1]


def compare(points: Sequence[Point], base: Sequence[Point]) -> list[Ratio]:
    """Of both frontiers, up to the highest speed that both reach; between points, lines.

    Who can serve users faster than asked for can serve them so: below its slowest point a curve stays where it is.
    """
    ours, theirs = frontier(points), frontier(base)
    low = min(ours[0].per_user, theirs[0].per_user)
    high = min(ours[-1].per_user, theirs[-1].per_user)
    speeds = [low + (high - low) * i / _NUM_STEPS for i in range(_NUM_STEPS + 1)]
    return [Ratio(speed, _at(ours, speed) / _at(theirs, speed)) for speed in speeds]


def winning(ratios: Sequence[Ratio]) -> list[tuple[float, float]]:
    """Ranges of speed in which the first pool gives more."""
    groups = itertools.groupby(ratios, key=lambda each: each.ratio > 1)
    ranges = [[each.per_user for each in group] for wins, group in groups if wins]
    return [(speeds[0], speeds[-1]) for speeds in ranges]


def _at(curve: Sequence[Point], speed: float) -> float:
    if speed <= curve[0].per_user:
        return curve[0].per_gpu
    for low, high in itertools.pairwise(curve):
        if low.per_user <= speed <= high.per_user:
            share = (speed - low.per_user) / (high.per_user - low.per_user)
            return low.per_gpu + share * (high.per_gpu - low.per_gpu)
    return curve[-1].per_gpu
