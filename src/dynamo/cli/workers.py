"""The workers of one command: how many of which kind, and, for `dynamo run`, a runtime in which they can be asked.

They run in this process or elsewhere; either way `dynamo run` gets a runtime in which their endpoint is registered.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynamo.base import config, errors
from dynamo.protocols import generate, instances
from dynamo.runtime import component
from dynamo.transfer.backends import local
from dynamo.worker import engines, main, model_source, settings

REMOTE_PREFIX = "dyn://"
Mode = Literal["agg", "prefill", "decode"] | None  # the value of --disaggregation-mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`num_prefill` workers compute long prompts for the `num_answering` others."""

    num_answering: int = 1
    num_prefill: int = 0

    @property
    def modes(self) -> dict[str, Mode]:
        """The mode of each worker, by name; prefill workers first, so that the others find them."""
        mode: Mode = "decode" if self.num_prefill else None
        modes: dict[str, Mode] = {
            f"prefill worker {n + 1}": "prefill" for n in range(self.num_prefill)
        }
        return modes | dict.fromkeys(self.answering, mode)

    @property
    def answering(self) -> list[str]:
        """The names of the workers that clients' requests go to."""
        kind = "decode worker" if self.num_prefill else "worker"
        return [f"{kind} {n + 1}" for n in range(self.num_answering)]

    def describe(self) -> str:
        """Describe the topology in one line."""
        if not self.num_prefill:
            return (
                f"aggregated: {_count(self.num_answering, 'worker')}, computing prompts and answers"
            )
        return (
            f"disaggregated: long prompts are computed by {_count(self.num_prefill, 'prefill worker')},"
            f" answers by {_count(self.num_answering, 'decode worker')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def is_remote(target: str) -> bool:
    """Return whether the target (`out=...`) names workers that run elsewhere."""
    return target.startswith(REMOTE_PREFIX)


def endpoint_of(target: str) -> instances.EndpointName:
    """Return the endpoint of the target's workers. Raises ConfigError for an unknown target."""
    if is_remote(target):
        return instances.EndpointName.parse(target)
    engines.kind_of(target)
    return settings.WorkerConfig().endpoint_name


@contextlib.asynccontextmanager
async def join(
    target: str, model: str | None, topology: Topology
) -> AsyncIterator[component.DistributedRuntime]:
    """Open a runtime in which the target's workers are registered; starts them unless they are remote.

    Raises ConfigError, EngineFailed or NoWorkers.
    """
    if is_remote(target):
        if topology != Topology():
            raise errors.ConfigError(
                "--prefill and --decode start workers here, but"
                f" out={target} asks those that run elsewhere"
            )
        planes = config.load(component.RuntimeConfig, prog="dynamo run", argv=())
        async with await component.DistributedRuntime.open(
            planes, item_type=generate.Output
        ) as runtime:
            prefix = f"{instances.CARDS}{endpoint_of(target).path}/"
            if not await runtime.discovery.get_prefix(prefix):
                raise errors.NoWorkers(
                    f"no worker serves {target}; start one there: "
                    f"python -m dynamo.native --endpoint {target}"
                )
            yield runtime
        return
    memory = component.MemoryCluster()
    async with (
        await component.DistributedRuntime.in_memory(memory, item_type=generate.Output) as runtime,
        contextlib.AsyncExitStack() as stack,
    ):
        directory = engines.find_model(target, model)
        room = local.Room() if topology.num_prefill else None
        for mode in topology.modes.values():
            worker = settings.WorkerConfig(model=model, disaggregation_mode=mode)
            await stack.enter_async_context(_serve(target, worker, runtime, directory, room))
        yield runtime


@contextlib.asynccontextmanager
async def _serve(
    engine_name: str,
    worker: settings.WorkerConfig,
    runtime: component.DistributedRuntime,
    directory: Path,
    room: local.Room | None,
) -> AsyncIterator[None]:
    """Serve one worker in this process, as an instance of its own."""
    engine = engines.build(
        engine_name,
        directory,
        engines.settings_of(engine_name)(),
        model_name=model_source.display_name(worker.model),
        room=room,
    )
    sibling = runtime.sibling()
    host = main.make_host(worker, engine, sibling, directory)
    try:
        await host.start()
        yield
    finally:
        await host.stop(0)
        await sibling.close()
