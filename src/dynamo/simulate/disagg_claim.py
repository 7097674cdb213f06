"""`python -m dynamo.simulate disagg`: the published gains of disaggregation, and where they end.

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
from dynamo.simulate import disagg, hardware, screen

_GPUS_OF_A_NODE = 8
Write = Callable[["Sequence[Case]", str, Path], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggConfig:
    """Compare prefill workers and a decode worker with aggregated workers on as many GPUs, in virtual time."""

    what: str = config.option("disagg", flag="", help="what to simulate: disagg")
    prompt_tokens: int = config.option(3000, help="of each request", least=1, most=1_000_000)
    output_tokens: int = config.option(150, help="of each answer", least=2, most=1_000_000)
    concurrency: int = config.option(
        256, help="clients, at most: 1, 2, 4 and so on up to here", least=1, most=4096
    )
    max_num_batched_tokens: int = config.option(
        2048, help="tokens that a step may compute: prompts are computed in such parts", least=1
    )
    max_num_seqs: int = config.option(256, help="sequences that may run in a worker", least=1)
    overhead_ms: float = config.option(
        3.0, help="of each step beside computing: scheduling, launching, sampling", least=0
    )
    flops_share: float = config.option(
        0.45, help="of the GPU's peak, reached by prompts", least=0.01, most=1
    )
    link_gb_s: float = config.option(300.0, help="of an all-reduce between GPUs, GB/s", least=0.1)
    transfer_gb_s: float = config.option(
        50.0, help="from prefill worker to decode worker, GB/s", least=0.001
    )
    max_ttft_s: float = config.option(
        0.0, help="leave out points whose mean time to first token is longer; 0: none", least=0
    )
    output: str | None = config.option(
        None, help="directory for the plot (PNG); needs matplotlib (the extra plots)"
    )


@dataclass(frozen=True, slots=True)
class Case:
    """So many nodes: the curve of each form, and those of the others compared with the first, aggregated."""

    num_nodes: int
    points: dict[str, list[disagg.Point]]
    ratios: dict[str, list[disagg.Ratio]]


def run(told: DisaggConfig, write: Write | None) -> None:
    """Print the table, and write the plot if there is a `write`. Raises ConfigError."""
    cases = [measure(told, num_nodes) for num_nodes in (1, 2)]
    caption = (
        f"{told.prompt_tokens} tokens in, {told.output_tokens} out, 1 to {told.concurrency} clients;"
        " gain: tokens per GPU over aggregated, at one speed for the user (tokens/s)"
    )
    screen.grid(COLUMNS, [row for case in cases for row in rows(case)], caption)
    if write is not None and told.output is not None:
        sys.stdout.write(f"wrote {write(cases, caption, Path(told.output))}\n")


def measure(told: DisaggConfig, num_nodes: int) -> Case:
    """All forms on so many nodes. Raises ConfigError for requests that do not fit."""
    points = {
        pool.name: [
            point
            for concurrency in _doubled(told.concurrency)
            if _is_quick(point := _point(told, pool, concurrency), told)
        ]
        for pool in pools(told, num_nodes)
    }
    base = points["aggregated"]
    others = {name: found for name, found in points.items() if name != "aggregated"}
    return Case(
        num_nodes,
        points,
        {n: disagg.compare(found, base) if found and base else [] for n, found in others.items()},
    )


def pools(told: DisaggConfig, num_nodes: int) -> list[disagg.Pool]:
    """Aggregated, disaggregated, and disaggregated as far as a worker's default limits say."""
    model = hardware.Model()
    gpu = hardware.Gpu(
        flops=told.flops_share * 1979e12,
        link_bytes_per_s=told.link_gb_s * 1e9,
        overhead_s=told.overhead_ms / 1e3,
    )
    half = num_nodes * _GPUS_OF_A_NODE // 2
    group = hardware.Group(gpu=gpu, model=model, size=half)
    aggregated = disagg.Pool(
        name="aggregated",
        num_workers=2,
        group=group,
        max_num_seqs=told.max_num_seqs,
        max_num_tokens=told.max_num_batched_tokens,
    )
    split = disagg.Pool(
        name="disaggregated",
        num_workers=1,
        group=group,
        num_prefill=half,
        prefill_group=hardware.Group(gpu=gpu, model=model, size=1),
        transfer_s=told.prompt_tokens * model.kv_bytes / (told.transfer_gb_s * 1e9),
        max_num_seqs=told.max_num_seqs,
        max_num_tokens=told.max_num_batched_tokens,
    )
    return [aggregated, split, conditional(split)]


def conditional(split: disagg.Pool) -> disagg.Pool:
    """The same with the limits that a worker has by default."""
    return replace(split, name="conditional", limits=policy.LocalPrefillLimits())


_SPEEDS = (25, 40, 50, 75)  # tokens a second of a user
COLUMNS = (
    "nodes", "form", "gain, most", "at", "gains at", *(f"at {speed}" for speed in _SPEEDS), "s to first token",
)  # fmt: skip


def rows(case: Case) -> list[tuple[str, ...]]:
    """Of the table, under `COLUMNS`."""
    return [
        (str(case.num_nodes), name, *_gains(ratios), _ttfts(case.points[name]))
        for name, ratios in case.ratios.items()
    ]


def _gains(ratios: Sequence[disagg.Ratio]) -> tuple[str, ...]:
    if not ratios:
        return ("-",) * (3 + len(_SPEEDS))
    best = max(ratios, key=lambda each: each.ratio)
    ranges = ", ".join(f"{low:.0f}-{high:.0f}" for low, high in disagg.winning(ratios)) or "never"
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


def _ttfts(points: Sequence[disagg.Point]) -> str:
    if not points:
        return "-"
    return f"{points[0].mean_ttft:.1f} to {max(point.mean_ttft for point in points):.1f}"


def _point(told: DisaggConfig, pool: disagg.Pool, concurrency: int) -> disagg.Point:
    return disagg.measure(
        pool, concurrency, num_prompt=told.prompt_tokens, num_output=told.output_tokens
    )


def _is_quick(point: disagg.Point, told: DisaggConfig) -> bool:
    return not told.max_ttft_s or point.mean_ttft <= told.max_ttft_s


def _doubled(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]
