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

The time of a step is a roofline, plus the cost of tensor parallelism:

    overhead + max(weights read, arithmetic) + keys and values read + all-reduces

Weights are read once for whatever is computed, so decode waits for memory and a prompt for arithmetic. Two all-reduces
a layer each cost their latency, and their bytes over the links: for a prompt on eight GPUs that is nearly as much time
as the arithmetic itself, which is why prompts are better computed by GPUs that each hold the whole model.

The default figures are those of H100 SXM and a Llama of 70 billion parameters in FP8; how much of the peaks is reached
is an assumption, and flags of `simulate disagg` change it. Latencies are seconds, rates are per second.
"""  # decider

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
from dynamo.planner import observation
from dynamo.simulate import screen
from dynamo.simulate.plan_cluster import PlanCluster
from dynamo.simulate.plan_worker import Request

ALWAYS_REMOTE = policy.LocalPrefillLimits(max_local_prefill_length=0, max_prefill_queue_size=2**31)
_NUM_ROUNDS = 6  # requests of each client; the first and the last are not counted
_NUM_SPEEDS = 200  # at which the curves are compared
_GPUS_PER_NODE = 8
WritePlot = Callable[["Sequence[Case]", str, Path], Path]
_SPEEDS = (25, 40, 50, 75)  # tokens a second for a user
COLUMNS = (
    "nodes", "form", "gain, most", "at", "gains at", *(f"at {speed}" for speed in _SPEEDS), "TTFT s",
)  # fmt: skip


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
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    repeated_cost: float = 0.0  # shared keys and values are read once, as by cascade attention
    transfer_bytes_per_s: float = math.inf

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

    def transfer_s(self, num_tokens: int) -> float:
        """Return the seconds in which the KV cache of so many tokens goes to another group."""
        return num_tokens * self.model.kv_bytes / self.transfer_bytes_per_s

    def step_s(
        self,
        prompts: Sequence[tuple[int, int]],
        num_decoding: int,
        num_active: int,
        num_prefilling: int = 0,
    ) -> float:
        """Return the seconds of a step; decode reads the keys and values of all but prompts in the making."""
        prompts_s = sum(self.prompt_s(start, end) for start, end in prompts)
        num_prompt_tokens = sum(end - start for start, end in prompts)
        num_read = num_active - num_prefilling + num_decoding if num_decoding else 0
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

    def decode_steps_s(self, num_steps: int, num_decoding: int, num_active: int) -> list[float]:
        end = num_active + num_steps * num_decoding
        return [self.step_s((), num_decoding, num) for num in range(num_active, end, num_decoding)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of workers. Without prefill workers it is aggregated."""

    name: str
    num_workers: int  # decode or aggregated workers
    group: GpuGroup
    num_prefill: int = 0
    prefill_group: GpuGroup | None = None
    limits: policy.LocalPrefillLimits = ALWAYS_REMOTE

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
    jobs, num_remote = serve(pool, concurrency, num_prompt=num_prompt, num_output=num_output)
    jobs.sort(key=lambda job: job.ended_at)
    counted = jobs[concurrency : len(jobs) - concurrency]
    span = counted[-1].ended_at - jobs[concurrency - 1].ended_at
    itl = fmean(job.itl_s for job in counted)
    return Point(
        concurrency=concurrency,
        per_user=1 / itl,
        per_gpu=len(counted) * num_output / span / pool.num_gpus,
        mean_ttft=fmean(job.ttft_s for job in counted),
        share_remote=num_remote / len(jobs),
    )


def serve(
    pool: Pool, concurrency: int, *, num_prompt: int, num_output: int
) -> tuple[list[Request], int]:
    """Return the requests of all clients, and how many of their prompts went to prefill workers."""
    for group in filter(None, (pool.group, pool.prefill_group)):
        if group.num_kv_tokens < num_prompt + num_output:
            raise errors.ConfigError(
                f"{pool.name}: a group of {group.size} GPUs has room for {max(0, group.num_kv_tokens)} tokens"
                f" beside the model, expected {num_prompt + num_output}"
            )
    requests: list[Request] = []
    num_remote = 0

    def ask() -> None:
        nonlocal num_remote
        if len(requests) == concurrency * _NUM_ROUNDS:
            return
        request = Request(at=cluster.now, num_prompt=num_prompt, num_output=num_output)
        requests.append(request)
        is_remote = pool.limits.allow_remote(num_prompt, cluster.prefill_queue)
        num_remote += is_remote
        cluster.submit(request, is_local=not is_remote)

    cluster = PlanCluster(
        pool.group, prefill_times=pool.prefill_group, is_aggregated=not pool.num_prefill, on_end=ask
    )
    cluster.add_ready(observation.Replicas(pool.num_prefill, pool.num_workers))
    for _ in range(concurrency):
        ask()
    cluster.run_until(math.inf)
    return requests, num_remote


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
    report_json: str | None = config.option(
        None, help="file for the points of all curves and their ratios as JSON"
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
    screen.check_output("--report-json", settings.report_json, is_directory=False)
    cases = [measure_case(settings, num_nodes) for num_nodes in (1, 2)]
    figures = [
        {
            "num_nodes": case.num_nodes,
            "points": {n: [p._asdict() for p in points] for n, points in case.points.items()},
            "ratios": {n: [r._asdict() for r in ratios] for n, ratios in case.ratios.items()},
        }
        for case in cases
    ]
    caption = (
        f"{settings.prompt_tokens} tokens in, {settings.output_tokens} out, 1 to {settings.concurrency} clients;"
        " gain: tokens per GPU over aggregated, at one speed for the user (tokens/s)"
    )
    screen.print_table(COLUMNS, [row for case in cases for row in rows(case)], caption)
    screen.write_json(settings.report_json, figures)
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
    group = GpuGroup(
        gpu=gpu,
        model=model,
        size=half,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        transfer_bytes_per_s=settings.transfer_gb_s * 1e9,
    )
    aggregated = Pool(name="aggregated", num_workers=2, group=group)
    split = replace(
        aggregated,
        name="disaggregated",
        num_workers=1,
        num_prefill=half,
        prefill_group=replace(group, size=1),
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
    gains = (
        f"{min(ratios, key=lambda each: abs(each.per_user - speed)).ratio:.2f}"
        if ratios[0].per_user <= speed <= ratios[-1].per_user
        else "-"
        for speed in _SPEEDS
    )
    return f"{best.ratio:.2f}", f"{best.per_user:.0f}", ranges, *gains
