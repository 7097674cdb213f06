"""One run for each policy, over the same workload and equal workers."""

import random
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dynamo.base import errors
from dynamo.router import api, prefix_index, worker_load
from dynamo.router import config as router_config
from dynamo.simulate import results
from dynamo.simulate.batch_worker import BatchWorker
from dynamo.simulate.config import SimulateConfig
from dynamo.simulate.fcfs_worker import FcfsWorker
from dynamo.simulate.simulation import Simulation
from dynamo.simulate.worker import SimulatedWorker
from dynamo.simulate.workload import SharedPrefixes, Trace, Workload, read_trace, spread

OnProgress = Callable[[int], None]
POLICIES = typing.get_args(typing.get_type_hints(router_config.RouterConfig)["router_policy"])


def check_policies(names: tuple[str, ...]) -> None:
    """Raises ConfigError."""
    unknown = [name for name in names if name not in POLICIES or name == "direct"]
    if unknown:
        known = ", ".join(name for name in POLICIES if name != "direct")
        raise errors.ConfigError(f"--policy: expected some of {known}, got {unknown[0]!r}")


def read_workload(config: SimulateConfig) -> Trace | None:
    """The trace, if there is one. Raises ConfigError."""
    if config.trace is None:
        return None
    trace = read_trace(Path(config.trace), limit=config.limit)
    return spread(trace) if config.spread else trace


def num_requests(config: SimulateConfig, trace: Trace | None) -> int:
    """Of one run."""
    return config.requests if trace is None else len(trace.arrivals)


def run(
    config: SimulateConfig,
    router: router_config.RouterConfig,
    trace: Trace | None,
    policy: str,
    on_progress: OnProgress,
    now: Callable[[], float],
) -> results.Summary:
    """One policy. `now` says how long the simulation itself takes."""
    workload = trace if trace is not None else _made_up(config)
    index = prefix_index.PrefixIndex()
    selector = router_config.make_selector(
        replace(router, router_policy=typing.cast(typing.Any, policy)),
        index,
        block_size=workload.block_size,
        draw=random.Random(config.seed).random,
    )
    workers = _workers(config, workload)
    selector.set_workers(dict.fromkeys(workers, _told(config, workload.block_size)))
    started = now()
    record = Simulation(workload, workers, selector, index, on_progress).run()
    return results.summarise(policy, record, list(workers), now() - started)


def _made_up(config: SimulateConfig) -> SharedPrefixes:
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


def _workers(config: SimulateConfig, workload: Workload) -> Mapping[api.Worker, SimulatedWorker]:
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


def _told(config: SimulateConfig, block_size: int) -> worker_load.Capacity:
    """What the router is told of each. A worker without decoding never runs out of blocks in use."""
    if config.engine == "batch":
        return _capacity(config, block_size)
    return worker_load.Capacity(max_num_batched_tokens=config.max_num_batched_tokens)


def _capacity(config: SimulateConfig, block_size: int) -> worker_load.Capacity:
    return worker_load.Capacity(
        total_blocks=config.cache_tokens // block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
