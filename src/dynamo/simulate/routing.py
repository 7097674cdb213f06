"""The runs of `simulate routing`: one per policy, over the same workload and equal workers."""

import random
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dynamo.base import errors
from dynamo.router import api, prefix_index, worker_load
from dynamo.router import config as router_config
from dynamo.simulate.config import SimulateConfig
from dynamo.simulate.simulation import PolicySummary, Simulation, summarise
from dynamo.simulate.workers import BatchWorker, FcfsWorker, SimulatedWorker
from dynamo.simulate.workload import SharedPrefixes, Trace, Workload, read_trace, spread_arrivals

OnProgress = Callable[[int], None]
POLICIES = typing.get_args(typing.get_type_hints(router_config.RouterConfig)["router_policy"])


def check_policies(names: tuple[str, ...]) -> None:
    """Raise ConfigError for an unknown policy, or one that selects no worker."""
    unknown = [name for name in names if name not in POLICIES or name == "direct"]
    if unknown:
        choices = ", ".join(name for name in POLICIES if name != "direct")
        raise errors.ConfigError(f"--policy: expected some of {choices}, got {unknown[0]!r}")


def read_workload(config: SimulateConfig) -> Trace | None:
    """Read the trace; None if the workload is synthetic. Raises ConfigError."""
    if config.trace is None:
        return None
    trace = read_trace(Path(config.trace), limit=config.limit)
    return spread_arrivals(trace) if config.spread else trace


def num_requests(config: SimulateConfig, trace: Trace | None) -> int:
    """Return the number of requests of one run."""
    return config.requests if trace is None else len(trace.arrivals)


def run(
    config: SimulateConfig,
    router: router_config.RouterConfig,
    trace: Trace | None,
    policy: str,
    on_progress: OnProgress,
    now: Callable[[], float],
) -> PolicySummary:
    """Simulate one policy. `now` is a clock that measures the real time of the simulation."""
    workload = trace if trace is not None else _synthetic_workload(config)
    index = prefix_index.PrefixIndex()
    selector = router_config.make_selector(
        replace(router, router_policy=typing.cast(typing.Any, policy)),
        index,
        block_size=workload.block_size,
        draw=random.Random(config.seed).random,
    )
    workers = _make_workers(config, workload)
    capacity = _capacity(config, workload.block_size)
    if config.engine == "fcfs":  # without decode it never runs out of blocks in use
        capacity = worker_load.Capacity(max_num_batched_tokens=config.max_num_batched_tokens)
    selector.set_workers(dict.fromkeys(workers, capacity))
    began_at = now()
    record = Simulation(workload, workers, selector, index, on_progress).run()
    return summarise(policy, record, list(workers), now() - began_at)


def _synthetic_workload(config: SimulateConfig) -> SharedPrefixes:
    return SharedPrefixes(
        num_prefixes=config.prefixes,
        prefix_tokens=config.prefix_tokens,
        suffix_tokens=config.suffix_tokens,
        output_tokens=config.output_tokens,
        num_requests=config.requests,
        concurrency=config.concurrency,
        block_size=config.block_size,
        seed=config.seed,
    )


def _make_workers(
    config: SimulateConfig, workload: Workload
) -> Mapping[api.Worker, SimulatedWorker]:
    ids = map(api.Worker, range(config.workers))
    if config.engine == "batch":
        capacity = _capacity(config, workload.block_size)
        return {worker: BatchWorker(capacity, block_size=workload.block_size) for worker in ids}
    assert isinstance(workload, Trace), "the fcfs engine needs a trace to know its rate"
    rate = workload.num_tokens / workload.duration_s / config.workers / config.load
    return {
        worker: FcfsWorker(
            tokens_per_s=rate,
            num_blocks=config.cache_tokens // workload.block_size,
            block_size=workload.block_size,
        )
        for worker in ids
    }


def _capacity(config: SimulateConfig, block_size: int) -> worker_load.Capacity:
    return worker_load.Capacity(
        total_blocks=config.cache_tokens // block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
