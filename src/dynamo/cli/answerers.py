"""Who answers in `dynamo run`: a worker in this process, or workers that run elsewhere.

Either way the command gets a runtime in which the endpoint is registered, and need not know which it is.
"""

import contextlib
from collections.abc import AsyncIterator

from dynamo.base import config, errors
from dynamo.protocols import instances
from dynamo.runtime import component
from dynamo.worker import engines, main, model_source, settings

REMOTE = "dyn://"


def check(target: str) -> None:
    """Raises ConfigError if nothing is called so."""
    if target.startswith(REMOTE):
        instances.EndpointName.parse(target)
    else:
        engines.kind_of(target)


def endpoint_of(target: str) -> instances.EndpointName:
    """Where they answer."""
    if target.startswith(REMOTE):
        return instances.EndpointName.parse(target)
    return settings.WorkerConfig().endpoint_name


@contextlib.asynccontextmanager
async def join(target: str, model: str | None) -> AsyncIterator[component.DistributedRuntime]:
    """A runtime in which they can be asked. Raises ConfigError, EngineFailed, NoWorkers."""
    if target.startswith(REMOTE):
        planes = config.load(component.RuntimeConfig, prog="dynamo run", argv=())
        async with await component.DistributedRuntime.open(planes) as runtime:
            await _check_served(runtime, target)
            yield runtime
        return
    memory = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(memory) as runtime,
        _worker(target, model, runtime),
    ):
        yield runtime


@contextlib.asynccontextmanager
async def _worker(
    engine_name: str, model: str | None, runtime: component.DistributedRuntime
) -> AsyncIterator[None]:
    kind = engines.kind_of(engine_name)
    directory = model_source.resolve(model, with_weights=kind.needs_weights)
    name = model_source.display_name(model)
    engine = engines.build(engine_name, directory, engines.settings_of(engine_name)(), name)
    served = main.make_host(settings.WorkerConfig(model=model), engine, runtime, directory)
    try:
        await served.start()
        yield
    finally:
        await served.stop(0)


async def _check_served(runtime: component.DistributedRuntime, target: str) -> None:
    prefix = f"{instances.CARDS}{endpoint_of(target).path}/"
    if not await runtime.discovery.get_prefix(prefix):
        raise errors.NoWorkers(
            f"nobody serves {target}; start a worker there: "
            f"python -m dynamo.native --endpoint {target}"
        )
