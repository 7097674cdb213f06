"""A process's membership in NATS: planes, queues and objects over one connection, loaded only where a setting asks."""

from dynamo.base import ids
from dynamo.runtime import work_queue as queues
from dynamo.runtime.backends.nats import (
    access,
    connection,
    events,
    object_store,
    requests,
    work_queue,
)


class NatsPlanes:
    """Whichever of them is not used costs nothing."""

    def __init__(self, to_nats: connection.Connection, *, namespace: str, instance_id: int) -> None:
        self.events = events.NatsEventPlane(to_nats, instance_id)
        self._connection = to_nats
        self._namespace = namespace

    def new_requests(self) -> requests.NatsRequestPlane:
        """A request plane with an inbox of its own."""
        network = requests.NatsNetwork(
            self._connection, namespace=self._namespace, number=ids.new_instance_id()
        )
        return requests.NatsRequestPlane(network)

    async def work_queue(self, name: str, bounds: queues.Bounds) -> work_queue.NatsWorkQueue:
        """Join the queue of this name. Raises ConfigError (no JetStream), Unavailable."""
        return await work_queue.NatsWorkQueue.open(self._connection, name, bounds)

    def object_store(self) -> object_store.NatsObjectStore:
        """Where objects are kept."""
        return object_store.NatsObjectStore(self._connection)

    @classmethod
    async def open(
        cls, whereto: access.Access, *, namespace: str, instance_id: int, start_timeout_s: float
    ) -> "NatsPlanes":
        """Raises ConfigError if there is no server, or it does not let us in."""
        to_nats = await connection.Connection.open(
            whereto, name=f"pydynamo {namespace} {instance_id:x}", start_timeout_s=start_timeout_s
        )
        return cls(to_nats, namespace=namespace, instance_id=instance_id)

    async def close(self) -> None:
        """After the planes."""
        await self._connection.close()
