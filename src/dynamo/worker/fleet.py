"""Several workers in one process: simulated ones, of which a machine could not hold hundreds as processes.

Each is an instance of its own, with an engine, an address and KV events of its own. They share what would cost a thread
or a file each (discovery's lease, the event plane) and the system port, whose counts are those of all together. They
start together and end together: if the engine of one dies, the process does.
"""

import asyncio
from collections.abc import Callable, Sequence

from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import instances, load
from dynamo.runtime import component
from dynamo.worker import host, metrics, system

MakeHost = Callable[[api.Engine, component.DistributedRuntime], host.Host]


class Fleet:
    """Looks like one `host.Host`."""

    def __init__(
        self,
        engines: Sequence[api.Engine],
        runtime: component.DistributedRuntime,
        make_host: MakeHost,
        *,
        endpoint: instances.EndpointName,
        counts: metrics.WorkerMetrics,
    ) -> None:
        self._engines = engines
        self._endpoint = endpoint
        self._runtimes = [runtime.sibling() for _ in engines]
        self._hosts = [
            make_host(engine, sibling)
            for engine, sibling in zip(engines, self._runtimes, strict=True)
        ]
        self._counts = counts
        self._system: system.SystemPort | None = None
        self._is_ready = False

    async def start(self) -> None:
        """All of them. Raises ConfigError, EngineFailed."""
        await asyncio.gather(*(one.start() for one in self._hosts))
        self._is_ready = True

    async def open_system_port(self, host: str, port: int) -> int:
        """Serve health and metrics of all; ready is who has started all."""
        self._system = system.SystemPort(
            endpoints=(self._endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: self._counts.uptime_s,
            render=lambda: self._counts.render(self._load() if self._is_ready else ()),
        )
        return await self._system.start(host, port)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises EngineFailed if an engine dies."""
        try:
            async with asyncio.TaskGroup() as group:
                for one in self._hosts:
                    group.create_task(one.run_until(stop))
        except* errors.EngineFailed as deaths:
            raise deaths.exceptions[0] from deaths.exceptions[0].__cause__

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """As `Host.stop`."""
        self._is_ready = False
        await asyncio.gather(*(one.stop(timeout_s, grace_s) for one in self._hosts))
        for sibling in self._runtimes:
            await sibling.close()
        if self._system is not None:
            await self._system.close()

    def _load(self) -> list[load.ForwardPassMetrics]:
        return [state for engine in self._engines for state in engine.load()]
