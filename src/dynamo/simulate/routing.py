"""The settings and the runs of `simulate routing`: one run per policy, over the same workload and equal workers."""

import random
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dynamo.base import config, errors
from dynamo.engine.mock import memory
from dynamo.router import api, prefix_index, worker_load
from dynamo.router import config as router_config
from dynamo.simulate.simulation import PolicySummary, Simulation, summarise
from dynamo.simulate.workers import MOCK_TIMING, BatchWorker, FcfsWorker, SimulatedWorker, StepTime
from dynamo.simulate.workload import (
    TRACE_BLOCK_SIZE,
    SharedPrefixes,
    Trace,
    Workload,
    read_trace,
    spread_arrivals,
)

OnProgress = Callable[[int], None]
POLICIES = typing.get_args(router_config.PolicyName)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWorkersConfig:
    """The simulated workers of the batch engine, and what is written of them."""

    max_num_seqs: int = config.option(256, help="sequences that may run at once", least=1)
    max_num_batched_tokens: int = config.option(
        8192, help="tokens that one step may compute", least=1
    )
    host_tokens: int = config.option(
        0, help="tokens in a host tier below each worker's cache; 0: none", least=0
    )
    host_gb_per_s: float = config.option(
        20.0, help="bandwidth of copies to and from the host tier in GB/s", least=0.001
    )
    kv_bytes_per_token: int = config.option(
        131_072, help="bytes of a token in the cache, for copies to and from the host tier", least=1
    )
    seed: int = config.option(0, help="seed of all random draws")
    report_json: str | None = config.option(None, help="file for the figures as JSON")
    output: str | None = config.option(
        None,
        help="directory for the plots (PNG) and report.html; needs matplotlib (the extra plots)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(BatchWorkersConfig):
    """Route a workload over simulated workers, in virtual time, by one policy after the other."""

    trace: str | None = config.option(
        None,
        help="trace file in Mooncake's format (JSON lines); without it, a synthetic workload (with --engine batch)",
    )
    trace_block_size: int = config.option(
        TRACE_BLOCK_SIZE, help="tokens of a block in a trace of Mooncake's format", least=1
    )
    policy: tuple[str, ...] = config.option(
        ("round-robin", "least-loaded", "consistent-hash", "dynamo", "estimated-ttft"),
        help="router policies to compare: comma-separated, or repeat the flag",
    )
    workers: int = config.option(8, help="number of workers", least=1, most=10_000)
    engine: Literal["fcfs", "batch"] = config.option(
        "fcfs",
        help="fcfs: one prompt after the other at a constant rate, no decode;"
        " batch: scheduler and timing of the mock engine",
    )
    cache_tokens: int = config.option(
        3_000_000, help="KV cache of each worker in tokens; 0: unlimited (fcfs only)", least=0
    )
    load: float = config.option(
        0.8, help="fcfs: offered prompt tokens over those that the workers can compute", least=0.01
    )
    limit: int | None = config.option(
        None, help="number of requests to take from the trace", least=2
    )
    spread: bool = config.option(
        False, help="spread requests with one time stamp evenly over the time until the next one"
    )
    prefixes: int = config.option(32, help="synthetic workload: number of shared prefixes", least=1)
    prefix_tokens: int = config.option(2048, help="synthetic workload: tokens of a prefix", least=1)
    suffix_tokens: int = config.option(
        50, help="synthetic workload: tokens of a prompt after its prefix", least=1
    )
    output_tokens: int = config.option(
        16, help="synthetic workload: output tokens of a request", least=1
    )
    requests: int = config.option(960, help="synthetic workload: number of requests", least=1)
    concurrency: int = config.option(
        16, help="synthetic workload: clients, each with one request at a time", least=1
    )
    block_size: int = config.option(16, help="synthetic workload: tokens of a KV block", least=1)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict one another."""
        if self.engine == "batch" and not self.cache_tokens:
            raise errors.ConfigError(
                "--cache-tokens 0: expected a limited cache for --engine batch"
            )
        if self.trace is None and self.engine == "fcfs":
            raise errors.ConfigError(
                "expected --trace FILE, or --engine batch for a synthetic workload"
            )
        if self.engine == "fcfs" and self.host_tokens:
            raise errors.ConfigError(
                f"--host-tokens {self.host_tokens}: expected --engine batch, fcfs has no tiers"
            )
        if self.trace is None and (self.spread or self.limit is not None):
            flag = "--spread" if self.spread else f"--limit {self.limit}"
            raise errors.ConfigError(f"{flag}: expected --trace FILE, whose requests it is for")


def check_policies(names: tuple[str, ...]) -> None:
    """Raise ConfigError for an unknown policy, or one that selects no worker, and without any."""
    if not names:
        raise errors.ConfigError("--policy: expected at least one")
    unknown = [name for name in names if name not in POLICIES or name == "direct"]
    if unknown:
        choices = ", ".join(name for name in POLICIES if name != "direct")
        raise errors.ConfigError(f"--policy: expected some of {choices}, got {unknown[0]!r}")


def read_workload(settings: SimulateConfig) -> Trace | None:
    """Read the trace; None if the workload is synthetic. Raises ConfigError."""
    if settings.trace is None:
        return None
    trace = read_trace(
        Path(settings.trace), limit=settings.limit, block_size=settings.trace_block_size
    )
    return spread_arrivals(trace) if settings.spread else trace


def num_requests(settings: SimulateConfig, trace: Trace | None) -> int:
    """Return the number of requests of one run."""
    return settings.requests if trace is None else len(trace.arrivals)


def run(
    settings: SimulateConfig,
    router: router_config.RouterConfig,
    trace: Trace | None,
    policy: str,
    on_progress: OnProgress,
    now: Callable[[], float],
    step_s: StepTime = MOCK_TIMING.step_s,
    repeated_cost: float = 0.0,
) -> PolicySummary:
    """Simulate one policy. `now` is a clock that measures the real time of the simulation.

    `step_s` and `repeated_cost` are those of the batch engine. Raises ConfigError for a request that does not fit into
    its cache.
    """
    workload = trace if trace is not None else _synthetic_workload(settings)
    index = prefix_index.PrefixIndex()
    selector = router_config.make_selector(
        replace(router, router_policy=typing.cast(typing.Any, policy)),
        index,
        block_size=workload.block_size,
        draw=random.Random(settings.seed).random,
    )
    workers = _make_workers(settings, workload, step_s, repeated_cost)
    capacity = _capacity(settings, workload.block_size)
    if settings.engine == "fcfs":  # without decode it never runs out of blocks in use
        capacity = worker_load.Capacity(max_num_batched_tokens=settings.max_num_batched_tokens)
    selector.set_workers(dict.fromkeys(workers, capacity))
    began_at = now()
    record = Simulation(workload, workers, selector, index, on_progress).run()
    return summarise(policy, record, list(workers), now() - began_at)


def _synthetic_workload(settings: SimulateConfig) -> SharedPrefixes:
    return SharedPrefixes(
        num_prefixes=settings.prefixes,
        prefix_tokens=settings.prefix_tokens,
        suffix_tokens=settings.suffix_tokens,
        output_tokens=settings.output_tokens,
        num_requests=settings.requests,
        concurrency=settings.concurrency,
        block_size=settings.block_size,
        seed=settings.seed,
    )


def _make_workers(
    settings: SimulateConfig, workload: Workload, step_s: StepTime, repeated_cost: float
) -> Mapping[api.Worker, SimulatedWorker]:
    ids = map(api.Worker, range(settings.workers))
    if settings.engine == "batch":
        size = workload.block_size
        capacity, tiers = _capacity(settings, size), _tiers(settings, size)
        longest = settings.prefix_tokens + settings.suffix_tokens + settings.output_tokens
        if isinstance(workload, Trace):
            longest = max(each.num_tokens + each.num_output for each in workload.arrivals)
        if longest > capacity.total_blocks * size:
            raise errors.ConfigError(
                f"--cache-tokens {settings.cache_tokens}: expected room for the longest request,"
                f" {longest:,} tokens with its answer"
            )
        return {
            worker: BatchWorker(
                capacity, block_size=size, step_s=step_s, repeated_cost=repeated_cost, tiers=tiers
            )
            for worker in ids
        }
    assert isinstance(workload, Trace), "the fcfs engine needs a trace to know its rate"
    rate = workload.num_tokens / workload.duration_s / settings.workers / settings.load
    return {
        worker: FcfsWorker(
            tokens_per_s=rate,
            num_blocks=settings.cache_tokens
            and max(1, settings.cache_tokens // workload.block_size),
            block_size=workload.block_size,
        )
        for worker in ids
    }


def _capacity(settings: SimulateConfig, block_size: int) -> worker_load.Capacity:
    return worker_load.Capacity(
        total_blocks=settings.cache_tokens // block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _tiers(settings: SimulateConfig, block_size: int) -> memory.SimulatedTiersConfig | None:
    if not settings.host_tokens:
        return None
    return memory.SimulatedTiersConfig(
        num_host_blocks=settings.host_tokens // block_size,
        num_disk_blocks=0,
        host_bytes_per_s=settings.host_gb_per_s * 1e9,
        disk_bytes_per_s=settings.host_gb_per_s * 1e9,
        block_size=block_size,
        block_bytes=settings.kv_bytes_per_token * block_size,
    )
