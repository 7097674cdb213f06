"""The services that a process may use beside its planes: work queues and an object store.

With planes in memory both are in memory too (`backends.memory.MemoryServices`). Else they are JetStream's, and the
process connects to NATS when it first needs them: requests over TCP and a queue in NATS are a mix like any other.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dynamo.base import clock, distribution, ids
from dynamo.runtime import object_store, work_queue
from dynamo.runtime.backends.nats import access as nats_access

if TYPE_CHECKING:  # it needs the packages of an extra
    from dynamo.runtime.backends.nats import planes as nats_planes


class Services(Protocol):
    """The services of one process."""

    async def work_queue(
        self, name: str, bounds: work_queue.WorkQueueBounds
    ) -> work_queue.WorkQueue:
        """Join the queue of this name. Raises ConfigError if there is no server, Unavailable if it does not answer."""
        ...

    def object_store(self) -> object_store.ObjectStore | None:
        """Return the object store; None if this process is not connected to a server that could keep objects."""
        ...

    async def close(self) -> None:
        """Disconnect; the planes are closed before."""
        ...


class NatsServices:
    """The services over NATS, connected when they are first needed."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        namespace: str,
        instance_id: ids.InstanceId,
        start_timeout_s: float,
        time: clock.Clock,
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._instance_id = instance_id
        self._start_timeout_s = start_timeout_s
        self._clock = time
        self._planes: nats_planes.NatsPlanes | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> "nats_planes.NatsPlanes":
        """Connect, once, and return the uses of the connection. Raises ConfigError if there is no server."""
        async with self._connecting:
            if self._planes is None:
                settings = nats_access.read(self._servers, os.environ)
                backend = distribution.load_extra(
                    "dynamo.runtime.backends.nats.planes", feature="NATS", extra="nats"
                )
                planes: nats_planes.NatsPlanes = await backend.NatsPlanes.open(
                    settings,
                    namespace=self._namespace,
                    instance_id=self._instance_id,
                    start_timeout_s=self._start_timeout_s,
                    time=self._clock,
                )
                self._planes = planes
            return self._planes

    async def work_queue(
        self, name: str, bounds: work_queue.WorkQueueBounds
    ) -> work_queue.WorkQueue:
        planes = await self.connect()
        return await planes.work_queue(name, bounds)

    def object_store(self) -> object_store.ObjectStore | None:
        return self._planes.object_store() if self._planes is not None else None

    async def close(self) -> None:
        if self._planes is not None:
            await self._planes.close()
