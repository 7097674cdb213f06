"""What a process may use beside its planes: queues of work, and a store of objects.

With planes in memory both are in memory too. Else they are JetStream's, and the process becomes a member of NATS when
the first part of it wants that: requests over TCP and a queue in NATS are a mix like any other.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

from dynamo.base import distribution, ids
from dynamo.runtime import events, object_store, requests, work_queue
from dynamo.runtime.backends import memory_object_store, memory_work_queue
from dynamo.runtime.backends.nats import access as nats_access


class Services(Protocol):
    """Of one process."""

    async def work_queue(self, name: str, bounds: work_queue.Bounds) -> work_queue.WorkQueue:
        """Join the queue of this name. Raises ConfigError if there is no server, Unavailable if it does not answer."""
        ...

    def object_store(self) -> object_store.ObjectStore | None:
        """Where objects are kept; None if this process has nothing to do with a server that could keep them."""
        ...

    async def close(self) -> None:
        """After the planes."""
        ...


class MemoryServices:
    """For the parts of one process."""

    def __init__(self) -> None:
        self._work: dict[str, memory_work_queue.MemoryWork] = {}
        self._objects = memory_object_store.MemoryObjectStore()

    async def work_queue(
        self, name: str, bounds: work_queue.Bounds
    ) -> memory_work_queue.MemoryWorkQueue:
        """See `Services`."""
        work = self._work.setdefault(name, memory_work_queue.MemoryWork(bounds))
        return memory_work_queue.MemoryWorkQueue(work)

    def object_store(self) -> memory_object_store.MemoryObjectStore:
        """See `Services`."""
        return self._objects

    async def close(self) -> None:
        """The other parts of the process may still use them."""


class NatsPlanes(Protocol):
    """`backends.nats.planes.NatsPlanes`, which is not imported where it is not used."""

    events: events.EventPlane

    def new_requests(self) -> requests.RequestPlane: ...

    async def work_queue(self, name: str, bounds: work_queue.Bounds) -> work_queue.WorkQueue: ...

    def object_store(self) -> object_store.ObjectStore: ...

    async def close(self) -> None: ...


class NatsServices:
    """Membership in NATS, from when it is wanted."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        namespace: str,
        instance_id: ids.InstanceId,
        start_timeout_s: float,
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._instance_id = instance_id
        self._start_timeout_s = start_timeout_s
        self._planes: NatsPlanes | None = None
        self._joining = asyncio.Lock()

    async def join(self) -> NatsPlanes:
        """Raises ConfigError if there is no server, or it does not let us in."""
        async with self._joining:
            if self._planes is None:
                whereto = nats_access.read(self._servers, os.environ)
                backend = distribution.load_extra(
                    "dynamo.runtime.backends.nats.planes", feature="NATS", extra="nats"
                )
                opened: NatsPlanes = await backend.NatsPlanes.open(
                    whereto,
                    namespace=self._namespace,
                    instance_id=self._instance_id,
                    start_timeout_s=self._start_timeout_s,
                )
                self._planes = opened
            return self._planes

    async def work_queue(self, name: str, bounds: work_queue.Bounds) -> work_queue.WorkQueue:
        """See `Services`."""
        planes = await self.join()
        return await planes.work_queue(name, bounds)

    def object_store(self) -> object_store.ObjectStore | None:
        """See `Services`."""
        return self._planes.object_store() if self._planes is not None else None

    async def close(self) -> None:
        """After the planes."""
        if self._planes is not None:
            await self._planes.close()
