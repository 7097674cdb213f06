"""The command `simulate disagg`: the published gains of disaggregation, and where they end.

The publication: R1-Distill-Llama-70B in FP8, prompts of 3,000 tokens, answers of 150, 1 to 256 clients, H100. On one
node four prefill workers of one GPU and a decode worker of four against two aggregated workers of four: 30 % more
tokens per GPU. On two nodes eight prefill workers of one GPU and a decode worker of eight against an aggregated worker
of eight on each: more than twice as many.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.base import config
from dynamo.disagg import policy
from dynamo.simulate import disagg, gpu_worker, screen

_GPUS_PER_NODE = 8
WritePlot = Callable[["Sequence[Case]", str, Path], Path]


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
    points: dict[str, list[disagg.Point]]
    ratios: dict[str, list[disagg.Ratio]]


def run(settings: DisaggConfig, write: WritePlot | None) -> None:
    """Simulate one and two nodes, print the table and write the plot, if `write` is given. Raises ConfigError."""
    cases = [measure(settings, num_nodes) for num_nodes in (1, 2)]
    caption = (
        f"{settings.prompt_tokens} tokens in, {settings.output_tokens} out, 1 to {settings.concurrency} clients;"
        " gain: tokens per GPU over aggregated, at one speed for the user (tokens/s)"
    )
    screen.print_table(COLUMNS, [row for case in cases for row in rows(case)], caption)
    if write is not None and settings.output is not None:
        sys.stdout.write(f"wrote {write(cases, caption, Path(settings.output))}\n")


def measure(settings: DisaggConfig, num_nodes: int) -> Case:
    """Simulate all pools on `num_nodes` nodes. Raises ConfigError for requests that do not fit."""
    points = {
        pool.name: [
            point
            for exponent in range(settings.concurrency.bit_length())
            for point in [
                disagg.measure(
                    pool,
                    2**exponent,
                    num_prompt=settings.prompt_tokens,
                    num_output=settings.output_tokens,
                )
            ]
            if not settings.max_ttft_s or point.mean_ttft <= settings.max_ttft_s
        ]
        for pool in pools(settings, num_nodes)
    }
    base = points["aggregated"]
    ratios = {
        name: disagg.compare(curve, base) if curve and base else []
        for name, curve in points.items()
        if name != "aggregated"
    }
    return Case(num_nodes, points, ratios)


def pools(settings: DisaggConfig, num_nodes: int) -> list[disagg.Pool]:
    """Return the pools: aggregated, disaggregated, and disaggregated within a worker's default limits."""
    model = gpu_worker.ModelShape()
    gpu = gpu_worker.Gpu(
        flops=settings.flops_share * 1979e12,
        link_bytes_per_s=settings.link_gb_s * 1e9,
        overhead_s=settings.overhead_ms / 1e3,
    )
    half = num_nodes * _GPUS_PER_NODE // 2
    group = gpu_worker.GpuGroup(gpu=gpu, model=model, size=half)
    aggregated = disagg.Pool(
        name="aggregated",
        num_workers=2,
        group=group,
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
    )
    split = disagg.Pool(
        name="disaggregated",
        num_workers=1,
        group=group,
        num_prefill=half,
        prefill_group=gpu_worker.GpuGroup(gpu=gpu, model=model, size=1),
        transfer_s=settings.prompt_tokens * model.kv_bytes / (settings.transfer_gb_s * 1e9),
        max_num_seqs=settings.max_num_seqs,
        max_num_tokens=settings.max_num_batched_tokens,
    )
    return [aggregated, split, conditional(split)]


def conditional(split: disagg.Pool) -> disagg.Pool:
    """Return the pool with the limits that a worker has by default."""
    return replace(split, name="conditional", limits=policy.LocalPrefillLimits())


_SPEEDS = (25, 40, 50, 75)  # tokens a second for a user
COLUMNS = (
    "nodes", "form", "gain, most", "at", "gains at", *(f"at {speed}" for speed in _SPEEDS), "s to first token",
)  # fmt: skip


def rows(case: Case) -> list[tuple[str, ...]]:
    """Return the rows of the table with `COLUMNS`."""
    lines = []
    for name, ratios in case.ratios.items():
        ttfts = [point.mean_ttft for point in case.points[name]]
        column = f"{ttfts[0]:.1f} to {max(ttfts):.1f}" if ttfts else "-"
        lines.append((str(case.num_nodes), name, *_gains(ratios), column))
    return lines


def _gains(ratios: Sequence[disagg.Ratio]) -> tuple[str, ...]:
    if not ratios:
        return ("-",) * (3 + len(_SPEEDS))
    best = max(ratios, key=lambda each: each.ratio)
    ranges = (
        ", ".join(f"{low:.0f}-{high:.0f}" for low, high in disagg.winning_ranges(ratios)) or "never"
    )
    return (
        f"{best.ratio:.2f}",
        f"{best.per_user:.0f}",
        ranges,
        *(_gain_at(ratios, speed) for speed in _SPEEDS),
    )


def _gain_at(ratios: Sequence[disagg.Ratio], speed: float) -> str:
    if not ratios[0].per_user <= speed <= ratios[-1].per_user:
        return "-"
    return f"{min(ratios, key=lambda each: abs(each.per_user - speed)).ratio:.2f}"
