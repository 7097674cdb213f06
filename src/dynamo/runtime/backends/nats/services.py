"""The uses of one connection to NATS, made when the first of them is needed: planes, work queues, an object store.

The packages of NATS are an extra, so the modules that use them are loaded with the connection.
"""

import asyncio
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dynamo.base import clock, distribution, ids
from dynamo.runtime.backends import frame_connection
from dynamo.runtime.backends.nats import access
from dynamo.runtime.services import WorkQueueBounds

if TYPE_CHECKING:  # they need the packages of an extra
    from dynamo.runtime.backends.nats import connection, jetstream, planes


class NatsServices:
    """The connection of one process and its uses; implements `services.Services`."""

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
        self._connection: connection.NatsConnection | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> "connection.NatsConnection":
        """Connect, once. Raises ConfigError if there is no server, or it refuses the credentials."""
        async with self._connecting:
            if self._connection is None:
                settings = access.read(self._servers, os.environ)
                self._connection = await _load("connection").NatsConnection.open(
                    settings,
                    name=f"pydynamo {self._namespace} {self._instance_id:x}",
                    start_timeout_s=self._start_timeout_s,
                    time=self._clock,
                )
            return self._connection

    def new_requests(
        self,
        item_type: Any,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        *,
        instance_id: int = 0,
    ) -> "planes.NatsRequestPlane":
        """Make a request plane with an inbox of its own, after `connect`."""
        assert self._connection is not None, "not connected"
        backend = _load("planes")
        network = backend.NatsNetwork(
            self._connection, namespace=self._namespace, number=ids.new_instance_id()
        )
        plane: planes.NatsRequestPlane = backend.NatsRequestPlane(
            network, limits, item_type=item_type, instance_id=instance_id
        )
        return plane

    def new_events(self) -> "planes.NatsEventPlane":
        """Make the event plane, after `connect`."""
        plane: planes.NatsEventPlane = _load("planes").NatsEventPlane(
            self._connection, self._instance_id
        )
        return plane

    async def work_queue(self, name: str, bounds: WorkQueueBounds) -> "jetstream.NatsWorkQueue":
        to_nats = await self.connect()
        queue: jetstream.NatsWorkQueue = await _load("jetstream").NatsWorkQueue.open(
            to_nats, name, bounds
        )
        return queue

    def object_store(self) -> "jetstream.NatsObjectStore | None":
        if self._connection is None:
            return None
        store: jetstream.NatsObjectStore = _load("jetstream").NatsObjectStore(self._connection)
        return store

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


def _load(module: str) -> ModuleType:
    return distribution.load_extra(
        f"dynamo.runtime.backends.nats.{module}", feature="NATS", extra="nats"
    )
