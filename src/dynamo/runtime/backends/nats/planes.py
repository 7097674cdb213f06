"""Planes, queues and objects over one connection to NATS, loaded only where a setting asks for it."""

from typing import Any

from dynamo.base import clock, ids
from dynamo.runtime import work_queue
from dynamo.runtime.backends.nats import access, connection, events, jetstream, requests


class NatsPlanes:
    """The uses of one connection; each costs nothing until it is used."""

    def __init__(
        self, to_nats: connection.NatsConnection, *, namespace: str, instance_id: int
    ) -> None:
        self.events = events.NatsEventPlane(to_nats, instance_id)
        self._connection = to_nats
        self._namespace = namespace

    def new_requests(self, item_type: Any) -> requests.NatsRequestPlane:
        """Make a request plane with an inbox of its own."""
        network = requests.NatsNetwork(
            self._connection, namespace=self._namespace, number=ids.new_instance_id()
        )
        return requests.NatsRequestPlane(network, item_type=item_type)

    async def work_queue(
        self, name: str, bounds: work_queue.WorkQueueBounds
    ) -> jetstream.NatsWorkQueue:
        """Join the queue of this name. Raises ConfigError (no JetStream), Unavailable."""
        return await jetstream.NatsWorkQueue.open(self._connection, name, bounds)

    def object_store(self) -> jetstream.NatsObjectStore:
        """Return the object store of the cluster."""
        return jetstream.NatsObjectStore(self._connection)

    @classmethod
    async def open(
        cls,
        settings: access.NatsAccess,
        *,
        namespace: str,
        instance_id: int,
        start_timeout_s: float,
        time: clock.Clock | None = None,
    ) -> "NatsPlanes":
        """Connect. Raises ConfigError if there is no server, or it refuses the credentials."""
        to_nats = await connection.NatsConnection.open(
            settings,
            name=f"pydynamo {namespace} {instance_id:x}",
            start_timeout_s=start_timeout_s,
            time=time,
        )
        return cls(to_nats, namespace=namespace, instance_id=instance_id)

    async def close(self) -> None:
        """Disconnect; the planes are closed before."""
        await self._connection.close()
