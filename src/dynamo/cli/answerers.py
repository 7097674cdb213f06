"""Who answers in `dynamo run`: one or more workers in this process, or workers that run elsewhere.

Either way the command gets a runtime in which the endpoint is registered, and need not know which it is.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from dynamo.base import config, errors
from dynamo.cli.topology import Topology
from dynamo.protocols import generate, instances
from dynamo.runtime import component
from dynamo.transfer.backends import local
from dynamo.worker import engines, main, model_source, settings

REMOTE = "dyn://"


def check(target: str) -> None:
    """Raises ConfigError if nothing is called so."""
    if is_remote(target):
        instances.EndpointName.parse(target)
    else:
        engines.kind_of(target)


def endpoint_of(target: str) -> instances.EndpointName:
    """Where they answer."""
    if is_remote(target):
        return instances.EndpointName.parse(target)
    return settings.WorkerConfig().endpoint_name


def is_remote(target: str) -> bool:
    """Do they run elsewhere?"""
    return target.startswith(REMOTE)


@contextlib.asynccontextmanager
async def join(
    target: str, model: str | None, topology: Topology
) -> AsyncIterator[component.DistributedRuntime]:
    """A runtime in which they can be asked. Raises ConfigError, EngineFailed, NoWorkers."""
    if is_remote(target):
        _check_ours(target, topology)
        planes = config.load(component.RuntimeConfig, prog="dynamo run", argv=())
        async with await component.DistributedRuntime.open(
            planes, item_type=generate.Output
        ) as runtime:
            await _check_served(runtime, target)
            yield runtime
        return
    memory = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(memory, item_type=generate.Output) as runtime,
        contextlib.AsyncExitStack() as workers,
    ):
        directory = model_source.resolve(model, with_weights=engines.kind_of(target).needs_weights)
        room = local.Room() if topology.num_prefill else None
        for mode in topology.modes.values():
            told = settings.WorkerConfig(model=model, disaggregation_mode=mode)
            await workers.enter_async_context(_worker(target, told, runtime, directory, room))
        yield runtime


@contextlib.asynccontextmanager
async def _worker(
    engine_name: str,
    told: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    directory: Path,
    room: local.Room | None,
) -> AsyncIterator[None]:
    """One of them, an instance of its own."""
    own = engines.settings_of(engine_name)()
    name = model_source.display_name(told.model)
    engine = engines.build(engine_name, directory, own, model_name=name, room=room)
    sibling = runtime.sibling()
    served = main.make_host(told, engine, sibling, directory)
    try:
        await served.start()
        yield
    finally:
        await served.stop(0)
        await sibling.close()


def _check_ours(target: str, topology: Topology) -> None:
    if topology != Topology():
        raise errors.ConfigError(
            f"--prefill and --decode start workers here, but out={target} asks those that run elsewhere"
        )


async def _check_served(runtime: component.DistributedRuntime, target: str) -> None:
    prefix = f"{instances.CARDS}{endpoint_of(target).path}/"
    if not await runtime.discovery.get_prefix(prefix):
        raise errors.NoWorkers(
            f"nobody serves {target}; start a worker there: "
            f"python -m dynamo.native --endpoint {target}"
        )
