"""Discovery, planes, work queue and object store within one process: for tests, simulations and one-process runs.

Discovery: members that share a `MemoryRegistry` see each other. Requests: the same connections that TCP has, over pipes
in memory; what is written is delivered in a later turn of the event loop, as a socket would do. Events: planes that
share a `MemoryBus` hear each other; what is published within one turn of the event loop comes as one batch in the next,
and a listener with a full batch misses later events, as it would on a network. The work queue has no timers: an
item has a time from which it is free, in the future while a process works on it.
"""

import asyncio
import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

from dynamo.base import clock, errors
from dynamo.runtime import authentication, services
from dynamo.runtime.backends import multiplex
from dynamo.runtime.discovery import Change, KeyView
from dynamo.runtime.events import BatchedSubscription, Event, Listener, PublishedTopics

BATCH_LIMIT = 10_000  # events of one listener within one turn
_SCHEME = "memory://"


class MemoryRegistry:
    """The keys of all members of one cluster, and the owner of each."""

    def __init__(self) -> None:
        self.view = KeyView()
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

    async def delete(self, *keys: str) -> None:
        for key in keys:
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
    """One end of a pipe between two protocols of this process. What is written arrives in a later turn of the loop."""

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


class MemoryBus:
    """The subscriptions of all event planes of one process, by topic."""

    def __init__(self) -> None:
        self._subscriptions: defaultdict[str, set[BatchedSubscription]] = defaultdict(set)

    def add(self, subscription: BatchedSubscription) -> None:
        self._subscriptions[subscription.topic].add(subscription)

    def remove(self, subscription: BatchedSubscription) -> None:
        self._subscriptions[subscription.topic].discard(subscription)

    def publish(self, event: Event) -> None:
        """Hand an event to all present subscriptions of its topic."""
        for subscription in self._subscriptions.get(event.topic, ()):
            subscription.add_event(event)


class MemoryEventPlane:
    """An `EventPlane` over a bus in this process's memory, for `dynamo run` and tests."""

    def __init__(self, bus: MemoryBus, instance_id: int) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._topics = PublishedTopics()
        self._subscriptions: set[BatchedSubscription] = set()
        self._is_open = True

    async def advertise(self, topic: str) -> None:
        self._topics.add(topic)

    async def listen(self) -> None:
        """Do nothing: this plane has no port."""

    def publish(self, topic: str, payload: bytes) -> None:
        if self._is_open:
            number = self._topics.take_number(topic)
            self._bus.publish(
                Event(topic=topic, publisher=self._instance_id, number=number, payload=payload)
            )

    def reconnect(self, topic: str, publisher: int) -> None:
        """Do nothing: there are no connections."""

    async def subscribe(self, topic: str, listener: Listener) -> BatchedSubscription:
        subscription = BatchedSubscription(topic, listener, max_events=BATCH_LIMIT)
        subscription.on_close = functools.partial(self._unsubscribe, subscription)
        self._bus.add(subscription)
        self._subscriptions.add(subscription)
        return subscription

    async def close(self) -> None:
        self._is_open = False
        for subscription in list(self._subscriptions):
            await subscription.close()

    async def _unsubscribe(self, subscription: BatchedSubscription) -> None:
        self._subscriptions.discard(subscription)
        self._bus.remove(subscription)


class MemoryObjectStore:
    """An object store shared by the parts of one process. It forgets nothing: the process ends first."""

    def __init__(
        self,
        bounds: services.ObjectStoreBounds = services.ObjectStoreBounds(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._bounds = bounds
        self._bodies: dict[str, bytes] = {}

    async def put(self, key: str, body: bytes) -> str:
        services.check_object_length(body, self._bounds)
        num_bytes = sum(len(stored) for name, stored in self._bodies.items() if name != key)
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


class MemoryWorkQueue:
    """One work queue, the oldest item first, for all parts of a process."""

    def __init__(
        self,
        bounds: services.WorkQueueBounds = services.WorkQueueBounds(),  # noqa: B008 (a frozen value)
        time: clock.Clock | None = None,
    ) -> None:
        self._bounds = bounds
        self._clock = time or clock.SystemClock()
        self._entries: dict[_Entry, None] = {}
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def push(self, body: bytes) -> None:
        services.check_item_length(body, self._bounds)
        depth = await self.depth()
        is_full = self._num_bytes + len(body) > self._bounds.max_bytes
        if is_full or depth >= self._bounds.max_items:
            raise errors.Overloaded(f"the work queue is full: {depth} items are in it; try later")
        self._entries[_Entry(body, self._clock.now())] = None
        self._num_bytes += len(body)
        self._wake()

    async def pull(self, timeout_s: float) -> "MemoryItem | None":
        until = self._clock.now() + timeout_s
        while True:
            self._remove_old()
            now = self._clock.now()
            entry = next((e for e in self._entries if e.free_at <= now), None)
            if entry is not None:
                entry.num_deliveries += 1
                entry.free_at = now + self._bounds.acknowledge_s
                return MemoryItem(self, entry)
            if now >= until:
                return None
            soonest = min((e.free_at for e in self._entries), default=until)
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(min(soonest, until) - now):
                    await self._changed.wait()

    async def depth(self) -> int:
        self._remove_old()
        return len(self._entries)

    async def num_waiting(self) -> int:
        self._remove_old()
        now = self._clock.now()
        return sum(entry.free_at <= now for entry in self._entries)

    async def close(self) -> None:
        """Do nothing: other parts of the process use the queue, too."""

    def reserve_item(self, entry: _Entry, delivery: int, duration_s: float | None = None) -> None:
        """Keep an item for its holder (None: for the whole time), unless it was delivered again since `delivery`."""
        if entry.num_deliveries == delivery:
            limit_s = self._bounds.acknowledge_s if duration_s is None else duration_s
            entry.free_at = self._clock.now() + limit_s
            self._wake()

    def remove_item(self, entry: _Entry) -> None:
        """Remove an item that is done or too old."""
        if entry in self._entries:
            del self._entries[entry]
            self._num_bytes -= len(entry.body)

    def _remove_old(self) -> None:
        oldest_allowed = self._clock.now() - self._bounds.max_age_s
        while self._entries and (oldest := next(iter(self._entries))).pushed_at <= oldest_allowed:
            self.remove_item(oldest)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryItem:
    """A pulled item, as one of its holders sees it."""

    def __init__(self, work: MemoryWorkQueue, entry: _Entry) -> None:
        self.body = entry.body
        self.num_deliveries = entry.num_deliveries
        self._work = work
        self._entry = entry

    async def acknowledge(self) -> None:
        self._work.remove_item(self._entry)

    async def keep(self) -> None:
        self._work.reserve_item(self._entry, self.num_deliveries)

    async def give_back(self, *, after_s: float = 0.0) -> None:
        self._work.reserve_item(self._entry, self.num_deliveries, after_s)


class MemoryServices:
    """The work queues and the object store of one process; implements `services.Services`."""

    def __init__(self, time: clock.Clock | None = None) -> None:
        self._clock = time
        self._work: dict[str, MemoryWorkQueue] = {}
        self._objects = MemoryObjectStore()

    async def work_queue(self, name: str, bounds: services.WorkQueueBounds) -> MemoryWorkQueue:
        return self._work.setdefault(name, MemoryWorkQueue(bounds, self._clock))

    def object_store(self) -> MemoryObjectStore:
        return self._objects

    async def close(self) -> None:
        """Keep all: other parts of the process may still use them."""
