"""Discovery, planes, work queue and object store within one process: for tests, simulations and one-process runs.

Discovery: members that share a `MemoryRegistry` see each other. Requests: the same connections that TCP has, over pipes
in memory; what is written is delivered in a later turn of the event loop, as a socket would do. Events: planes that
share a `MemoryBus` hear each other; what is published within one turn of the event loop comes as one batch in the next,
and a listener with a full batch misses later events, as it would on a network. The work queue has no timers: an
item has a time from which it is free, in the future while a process works on it.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dynamo.base import clock, errors
from dynamo.runtime import authentication, object_store, work_queue
from dynamo.runtime.backends import frame_connection, key_view, multiplex
from dynamo.runtime.discovery import Change
from dynamo.runtime.events import Event, Listener

BATCH_LIMIT = 10_000  # events of one listener within one turn
_SCHEME = "memory://"


class MemoryRegistry:
    """The keys of all members of one cluster, and the owner of each."""

    def __init__(self) -> None:
        self.view = key_view.KeyView()
        self.owner_by_key: dict[str, MemoryDiscovery] = {}


class MemoryDiscovery:
    """One member: the owner of the keys that it put, for as long as it lives."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self._is_open = True

    async def put(self, key: str, value: bytes) -> None:
        if not self._is_open:
            raise errors.LocalProtocolError(f"put {key!r}: this discovery is closed")
        self._registry.owner_by_key[key] = self
        self._registry.view.put(key, value)

    async def delete(self, key: str) -> None:
        self._remove(key)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        return self._registry.view.get_prefix(prefix)

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        return self._registry.view.watch(prefix)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Simulate the death of this owner: its keys vanish for all others."""
        self._is_open = False
        for key in list(self._registry.owner_by_key):
            self._remove(key)

    def _remove(self, key: str) -> None:
        if self._registry.owner_by_key.get(key) is self:
            del self._registry.owner_by_key[key]
            self._registry.view.remove(key)


class MemoryTransport(asyncio.Transport):
    """One end of a pipe."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._peer = self
        self._is_closing = False

    @classmethod
    def connect(cls, client: asyncio.Protocol, server: asyncio.Protocol) -> None:
        """Make a pipe between two protocols."""
        client_end, server_end = cls(client), cls(server)
        client_end._peer, server_end._peer = server_end, client_end
        server.connection_made(server_end)
        client.connection_made(client_end)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._loop.call_soon(self._peer._deliver, bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon(self._protocol.connection_lost, None)
        self._loop.call_soon(self._peer.close)

    def abort(self) -> None:
        self.close()

    def _deliver(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)


class MemoryNetwork:
    """The network that several planes of one process share."""

    name = "memory"

    def __init__(self) -> None:
        self._listeners: dict[str, authentication.MakeProtocol] = {}
        self._numbers = itertools.count(1)

    async def listen(self, make_protocol: authentication.MakeProtocol) -> multiplex.NetworkListener:
        address = f"memory:{next(self._numbers)}"
        self._listeners[address] = make_protocol
        return multiplex.NetworkListener(
            address=address, close=lambda: self._listeners.pop(address, None)
        )

    async def connect(self, address: str, make_protocol: authentication.MakeProtocol) -> None:
        if address not in self._listeners:
            raise errors.WorkerLost(f"nobody listens at {address}")
        MemoryTransport.connect(make_protocol(), self._listeners[address]())


class MemoryRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of one part of a process; parts that share a network reach each other."""

    def __init__(
        self,
        network: MemoryNetwork,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        *,
        item_type: Any = Any,
        time: clock.Clock | None = None,
    ) -> None:
        super().__init__(network, limits, item_type=item_type, time=time)


class MemoryBus:
    """The subscriptions of all event planes of one process, by topic."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, set[MemorySubscription]] = defaultdict(set)

    def add(self, subscription: "MemorySubscription") -> None:
        self._subscriptions[subscription.topic].add(subscription)

    def remove(self, subscription: "MemorySubscription") -> None:
        self._subscriptions[subscription.topic].discard(subscription)

    def publish(self, event: Event) -> None:
        """Hand an event to all present subscriptions of its topic."""
        for subscription in self._subscriptions.get(event.topic, ()):
            subscription.add_event(event)


class MemorySubscription:
    """One listener and the events that it will receive in the loop's next turn."""

    def __init__(self, bus: MemoryBus, topic: str, listener: Listener) -> None:
        self.topic = topic
        self._bus = bus
        self._listener = listener
        self._batch: list[Event] = []

    def add_event(self, event: Event) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._deliver)
        if len(self._batch) < BATCH_LIMIT:
            self._batch.append(event)

    async def close(self) -> None:
        self._bus.remove(self)
        self._batch.clear()

    def _deliver(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._listener(batch)


class MemoryEventPlane:
    """One process's side of the bus."""

    def __init__(self, bus: MemoryBus, instance_id: int) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._next_number_by_topic: dict[str, int] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._is_open = True

    async def advertise(self, topic: str) -> None:
        self._next_number_by_topic.setdefault(topic, 0)

    def publish(self, topic: str, payload: bytes) -> None:
        if not self._is_open:
            return
        number = self._next_number_by_topic.get(topic)
        if number is None:
            raise errors.LocalProtocolError(f"publish to {topic!r}: advertise the topic first")
        self._next_number_by_topic[topic] = number + 1
        self._bus.publish(
            Event(topic=topic, publisher=self._instance_id, number=number, payload=payload)
        )

    async def subscribe(self, topic: str, listener: Listener) -> MemorySubscription:
        subscription = MemorySubscription(self._bus, topic, listener)
        self._bus.add(subscription)
        self._subscriptions.append(subscription)
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in self._subscriptions:
            await subscription.close()


class MemoryObjectStore:
    """An object store shared by the parts of one process. It forgets nothing: the process ends first."""

    def __init__(
        self,
        bounds: object_store.ObjectStoreBounds = object_store.ObjectStoreBounds(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._bounds = bounds
        self._bodies: dict[str, bytes] = {}

    async def put(self, key: str, body: bytes) -> str:
        object_store.check_length(body, self._bounds)
        num_bytes = sum(len(other) for name, other in self._bodies.items() if name != key)
        if num_bytes + len(body) > self._bounds.max_bytes:
            raise errors.Overloaded(f"the object store is full: {num_bytes} bytes are in it")
        self._bodies[key] = body
        return f"{_SCHEME}{key}"

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        try:
            return self._bodies[url.removeprefix(_SCHEME)]
        except KeyError:
            raise errors.Unavailable(f"{url} is not in the object store of this process") from None


class _Entry:
    """An item of work that is not acknowledged yet."""

    def __init__(self, body: bytes, now: float) -> None:
        self.body = body
        self.pushed_at = now
        self.free_at = now
        self.num_deliveries = 0


class MemoryWork:
    """The items of one work queue, the oldest first."""

    def __init__(
        self,
        bounds: work_queue.WorkQueueBounds = work_queue.WorkQueueBounds(),  # noqa: B008 (a frozen value)
        time: clock.Clock | None = None,
    ) -> None:
        self.bounds = bounds
        self.clock = time or clock.SystemClock()
        self._entries: dict[_Entry, None] = {}
        self._num_bytes = 0
        self._changed = asyncio.Event()

    def add_item(self, body: bytes) -> None:
        """Add an item of work. Raises Overloaded if the queue is full."""
        depth = self.depth()
        is_full = self._num_bytes + len(body) > self.bounds.max_bytes
        if is_full or depth >= self.bounds.max_items:
            raise errors.Overloaded(f"the work queue is full: {depth} items are in it; try later")
        self._entries[_Entry(body, self.clock.now())] = None
        self._num_bytes += len(body)
        self._wake()

    def take_item(self) -> _Entry | None:
        """Take the oldest free item, or None."""
        self._remove_old()
        now = self.clock.now()
        entry = next((e for e in self._entries if e.free_at <= now), None)
        if entry is not None:
            entry.num_deliveries += 1
            entry.free_at = now + self.bounds.acknowledge_s
        return entry

    async def wait(self, until: float) -> None:
        """Wait until an item may be free that was not, or the clock shows `until`."""
        soonest = min((e.free_at for e in self._entries), default=until)
        try:
            async with self.clock.timeout(min(soonest, until) - self.clock.now()):
                await self._changed.wait()
        except TimeoutError:
            return

    def reserve_item(self, entry: _Entry, delivery: int, duration_s: float) -> None:
        """Keep an item for its holder for `duration_s`, unless it was delivered again since `delivery`."""
        if entry.num_deliveries == delivery:
            entry.free_at = self.clock.now() + duration_s
            self._wake()

    def remove_item(self, entry: _Entry) -> None:
        """Remove an item that is done or too old."""
        if entry in self._entries:
            del self._entries[entry]
            self._num_bytes -= len(entry.body)

    def depth(self) -> int:
        self._remove_old()
        return len(self._entries)

    def num_waiting(self) -> int:
        self._remove_old()
        now = self.clock.now()
        return sum(entry.free_at <= now for entry in self._entries)

    def _remove_old(self) -> None:
        oldest_allowed = self.clock.now() - self.bounds.max_age_s
        while self._entries and (oldest := next(iter(self._entries))).pushed_at <= oldest_allowed:
            self.remove_item(oldest)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryItem:
    """A pulled item, as one of its holders sees it."""

    def __init__(self, work: MemoryWork, entry: _Entry) -> None:
        self.body = entry.body
        self.num_deliveries = entry.num_deliveries
        self._work = work
        self._entry = entry

    async def acknowledge(self) -> None:
        self._work.remove_item(self._entry)

    async def keep(self) -> None:
        self._work.reserve_item(self._entry, self.num_deliveries, self._work.bounds.acknowledge_s)

    async def give_back(self, *, after_s: float = 0.0) -> None:
        self._work.reserve_item(self._entry, self.num_deliveries, after_s)


class MemoryWorkQueue:
    """One party's side of a `MemoryWork`."""

    def __init__(self, work: MemoryWork) -> None:
        self._work = work

    async def push(self, body: bytes) -> None:
        work_queue.check_length(body, self._work.bounds)
        self._work.add_item(body)

    async def pull(self, timeout_s: float) -> MemoryItem | None:
        until = self._work.clock.now() + timeout_s
        while (entry := self._work.take_item()) is None:
            if self._work.clock.now() >= until:
                return None
            await self._work.wait(until)
        return MemoryItem(self._work, entry)

    async def depth(self) -> int:
        return self._work.depth()

    async def num_waiting(self) -> int:
        return self._work.num_waiting()

    async def close(self) -> None:
        """Leave; nothing belongs to this party alone."""


class MemoryServices:
    """The work queues and the object store of one process; implements `services.Services`."""

    def __init__(self, time: clock.Clock | None = None) -> None:
        self._clock = time
        self._work: dict[str, MemoryWork] = {}
        self._objects = MemoryObjectStore()

    async def work_queue(self, name: str, bounds: work_queue.WorkQueueBounds) -> MemoryWorkQueue:
        work = self._work.setdefault(name, MemoryWork(bounds, self._clock))
        return MemoryWorkQueue(work)

    def object_store(self) -> MemoryObjectStore:
        return self._objects

    async def close(self) -> None:
        """Keep all: other parts of the process may still use them."""
