"""The comparison of aggregated and disaggregated pools of as many GPUs, with the same clients, in virtual time.

Each client sends its next request when the last has ended. A point of a pool's curve is the speed for a user (tokens a
second after the first) and the output of a GPU (tokens a second), with one number of clients. Curves are compared at
equal speed for the user, as the published figures are. `disagg.policy` decides which prompts go to a prefill worker, as
in a worker.

The command `simulate disagg` prints the published gains of disaggregation, and where they end. The publication:
R1-Distill-Llama-70B in FP8, prompts of 3,000 tokens, answers of 150, 1 to 256 clients, H100. On one node four prefill
workers of one GPU and a decode worker of four against two aggregated workers of four: 30 % more tokens per GPU. On two
nodes eight prefill workers of one GPU and a decode worker of eight against an aggregated worker of eight on each: more
than twice as many.
"""

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from dynamo.base import config, errors
from dynamo.disagg import policy
from dynamo.simulate import screen
from dynamo.simulate.workers import Gpu, GpuGroup, GpuWorker, Job, ModelShape

ALWAYS_REMOTE = policy.LocalPrefillLimits(max_local_prefill_length=0, max_prefill_queue_size=2**31)
_NUM_ROUNDS = 6  # requests of each client; the first and the last are not counted
_NUM_SPEEDS = 200  # at which the curves are compared
_GPUS_PER_NODE = 8
WritePlot = Callable[["Sequence[Case]", str, Path], Path]
_SPEEDS = (25, 40, 50, 75)  # tokens a second for a user
COLUMNS = (
    "nodes", "form", "gain, most", "at", "gains at", *(f"at {speed}" for speed in _SPEEDS), "s to first token",
)  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggConfig:
    """Compare prefill workers and a decode worker with aggregated workers on as many GPUs, in virtual time."""

    scenario: str = config.option("disagg", flag="", help="simulation to run: disagg")
    prompt_tokens: int = config.option(
        3000, help="prompt tokens of each request", least=1, most=1_000_000
    )
    output_tokens: int = config.option(
        150, help="output tokens of each request", least=2, most=1_000_000
    )
    concurrency: int = config.option(
        256, help="largest number of clients; simulated are 1, 2, 4 and so on", least=1, most=4096
    )
    max_num_batched_tokens: int = config.option(
        2048, help="tokens that one step may compute; longer prompts are split", least=1
    )
    max_num_seqs: int = config.option(
        256, help="sequences that may run at once in a worker", least=1
    )
    overhead_ms: float = config.option(
        3.0, help="milliseconds per step for scheduling, launching and sampling", least=0
    )
    flops_share: float = config.option(
        0.45, help="share of the GPU's peak arithmetic that prefill reaches", least=0.01, most=1
    )
    link_gb_s: float = config.option(
        300.0, help="bandwidth of an all-reduce between GPUs in GB/s", least=0.1
    )
    transfer_gb_s: float = config.option(
        50.0, help="bandwidth from prefill to decode worker in GB/s", least=0.001
    )
    max_ttft_s: float = config.option(
        0.0,
        help="leave out results with a longer mean time to first token, in seconds; 0: keep all",
        least=0,
    )
    output: str | None = config.option(
        None, help="directory for the plot (PNG); needs matplotlib (the extra plots)"
    )


@dataclass(frozen=True, slots=True)
class Case:
    """The results for one number of nodes: the curve of each pool, and its ratios to the aggregated pool."""

    num_nodes: int
    points: dict[str, list[Point]]
    ratios: dict[str, list[Ratio]]


def run(settings: DisaggConfig, write: WritePlot | None) -> None:
    """Simulate one and two nodes, print the table and write the plot, if `write` is given. Raises ConfigError."""
    cases = [measure_case(settings, num_nodes) for num_nodes in (1, 2)]
    caption = (
        f"{settings.prompt_tokens} tokens in, {settings.output_tokens} out, 1 to {settings.concurrency} clients;"
        " gain: tokens per GPU over aggregated, at one speed for the user (tokens/s)"
    )
    screen.print_table(COLUMNS, [row for case in cases for row in rows(case)], caption)
    if write is not None and settings.output is not None:
        sys.stdout.write(f"wrote {write(cases, caption, Path(settings.output))}\n")


def measure_case(settings: DisaggConfig, num_nodes: int) -> Case:
    """Simulate all pools on `num_nodes` nodes. Raises ConfigError for requests that do not fit."""
    points: dict[str, list[Point]] = {}
    sizes = {"num_prompt": settings.prompt_tokens, "num_output": settings.output_tokens}
    for pool in pools(settings, num_nodes):
        curve = [measure(pool, 2**i, **sizes) for i in range(settings.concurrency.bit_length())]
        limit = settings.max_ttft_s or math.inf
        points[pool.name] = [point for point in curve if point.mean_ttft <= limit]
    base = points["aggregated"]
    ratios = {
        name: compare(curve, base) if curve and base else []
        for name, curve in points.items()
        if name != "aggregated"
    }
    return Case(num_nodes, points, ratios)


def pools(settings: DisaggConfig, num_nodes: int) -> list[Pool]:
    """Return the pools: aggregated, disaggregated, and disaggregated within a worker's default limits."""
    model = ModelShape()
    gpu = Gpu(
        flops=settings.flops_share * 1979e12,
        link_bytes_per_s=settings.link_gb_s * 1e9,
        overhead_s=settings.overhead_ms / 1e3,
    )
    half = num_nodes * _GPUS_PER_NODE // 2
    group = GpuGroup(gpu=gpu, model=model, size=half)
    aggregated = Pool(
        name="aggregated",
        num_workers=2,
        group=group,
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
    )
    split = replace(
        aggregated,
        name="disaggregated",
        num_workers=1,
        num_prefill=half,
        prefill_group=GpuGroup(gpu=gpu, model=model, size=1),
        transfer_s=settings.prompt_tokens * model.kv_bytes / (settings.transfer_gb_s * 1e9),
    )
    conditional = replace(split, name="conditional", limits=policy.LocalPrefillLimits())
    return [aggregated, split, conditional]


def rows(case: Case) -> list[tuple[str, ...]]:
    """Return the rows of the table with `COLUMNS`."""
    lines = []
    for name, ratios in case.ratios.items():
        ttfts = [point.mean_ttft for point in case.points[name]]
        column = f"{ttfts[0]:.1f} to {max(ttfts):.1f}" if ttfts else "-"
        lines.append((str(case.num_nodes), name, *_gains(ratios), column))
    return lines


def _gains(ratios: Sequence[Ratio]) -> tuple[str, ...]:
    if not ratios:
        return ("-",) * (3 + len(_SPEEDS))
    best = max(ratios, key=lambda each: each.ratio)
    ranges = ", ".join(f"{low:.0f}-{high:.0f}" for low, high in winning_ranges(ratios)) or "never"
    return (
        f"{best.ratio:.2f}",
        f"{best.per_user:.0f}",
        ranges,
        *(_gain_at(ratios, speed) for speed in _SPEEDS),
    )


def _gain_at(ratios: Sequence[Ratio], speed: float) -> str:
    if not ratios[0].per_user <= speed <= ratios[-1].per_user:
        return "-"
    return f"{min(ratios, key=lambda each: abs(each.per_user - speed)).ratio:.2f}"
