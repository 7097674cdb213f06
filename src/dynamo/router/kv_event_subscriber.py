"""Keeps a prefix index equal to what the workers of one component hold.

It listens to their KV events, follows in discovery who can replay them, and asks a worker for what is missing: when it
appears (all that it holds), and whenever its numbers show a hole (`event_order`). A worker that vanishes from
discovery is removed at once; what is still heard of it counts no more.

One question per worker runs at a time, and `MAX_QUESTIONS` in all; one that fails is asked again, ever more slowly.

A *snapshot* spares a router that starts anew most of this: what it says of a worker is used when that worker appears,
which then tells only what has happened since.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import generate, instances, kv_events
from dynamo.router import api, kv_event_order, prefix_index, snapshot
from dynamo.runtime import component, events

MAX_QUESTIONS = 8
ANSWER_LIMIT_S = 60.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
RESTORE_WINDOW_S = 60.0  # for how long a snapshot waits for the workers that it speaks of
_SWEEP_SEGMENTS = 16  # in one turn of the event loop

_logger = logging.getLogger(__name__)
_decode_batch = msgspec.msgpack.Decoder(kv_events.EventBatch).decode
_decode_part = msgspec.msgpack.Decoder(kv_events.ReplayPart).decode


class KvEventSubscriber:
    """Feeds `index`. Started with `start`, ended with `close`, before the runtime is."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        index: prefix_index.PrefixIndex,
        *,
        namespace: str,
        component_name: str,
        clock: clocks.Clock,
    ) -> None:
        self._runtime = runtime
        self._index = index
        self._topic = f"{namespace}/{component_name}/kv_events"
        self._clock = clock
        self._client = runtime.client(
            instances.EndpointName(namespace, component_name, instances.KV_EVENTS_REPLAY)
        )
        self._orders: dict[int, dict[int, kv_event_order.KvEventOrder]] = {}  # by instance, by rank
        self._unanswered: set[int] = set()  # instances that never answered in full
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._snapshots: dict[int, list[snapshot.RankSnapshot]] = {}
        self._questions = asyncio.Semaphore(MAX_QUESTIONS)
        self._sweeping: asyncio.Task[None] | None = None
        self._tasks = tasks.Tasks()
        self._subscription: events.Subscription | None = None

    async def start(self, saved: bytes | None = None) -> None:
        """Listen, beginning with a snapshot if there is one. Raises ConfigError if it is none."""
        if saved is not None:
            for rank in snapshot.decode(saved):
                self._snapshots.setdefault(rank.instance_id, []).append(rank)
            self._tasks.start("end of restoring", self._end_restoring())
        self._subscription = await self._runtime.events.subscribe(self._topic, self._heard)
        self._client.on_change(self._instances_changed)
        self._instances_changed()

    async def close(self) -> None:
        """Listen no more; the index stays as it is."""
        if self._subscription is not None:
            await self._subscription.close()
        await self._client.close()
        await self._tasks.close()

    @property
    def is_current(self) -> bool:
        """Whether nothing is known to be missing, of any worker that is there."""
        return not self._unanswered and not any(
            order.is_behind for orders in self._orders.values() for order in orders.values()
        )

    def snapshot(self) -> bytes:
        """All that is known now, for `start`. Takes some 50 ms per million blocks, in one piece."""
        return snapshot.encode(
            self._index,
            {
                api.Worker(instance_id, dp_rank): order.position
                for instance_id, orders in self._orders.items()
                for dp_rank, order in orders.items()
                if order.position is not None
            },
        )

    def _heard(self, batch: list[events.Event]) -> None:
        for event in batch:
            try:
                self._take(_decode_batch(event.payload))
            except msgspec.DecodeError as error:
                _logger.warning("ignored a KV event of %x: %s", event.publisher, error)

    def _take(self, batch: kv_events.EventBatch) -> None:
        if batch.worker_id not in self._orders:
            return  # it is gone; or it comes, and will be asked for everything
        order = self._order(batch.worker_id, batch.dp_rank)
        self._apply(api.Worker(batch.worker_id, batch.dp_rank), order.take(batch))
        if order.is_behind:
            self._ask_if_behind(batch.worker_id)

    def _replayed(self, instance_id: int, part: kv_events.ReplayPart) -> None:
        if instance_id in self._orders:
            order = self._order(instance_id, part.dp_rank)
            self._apply(api.Worker(instance_id, part.dp_rank), order.replayed(part))

    def _apply(self, worker: api.Worker, told: Sequence[kv_events.KvEvent]) -> None:
        for event in told:
            try:
                self._index.apply(worker, event)
            except errors.RemoteProtocolError as error:
                _logger.warning("ignored a KV event: %s", error)

    def _order(self, instance_id: int, dp_rank: int) -> kv_event_order.KvEventOrder:
        return self._orders[instance_id].setdefault(dp_rank, kv_event_order.KvEventOrder())

    def _instances_changed(self) -> None:
        for instance_id in self._orders.keys() - self._client.instances.keys():
            self._left(instance_id)
        for instance_id in self._client.instances.keys() - self._orders.keys():
            self._came(instance_id)

    def _came(self, instance_id: int) -> None:
        self._orders[instance_id] = {}
        self._unanswered.add(instance_id)
        for rank in self._snapshots.pop(instance_id, ()):
            rank.restore(self._index)
            self._orders[instance_id][rank.dp_rank] = kv_event_order.KvEventOrder(rank.position)
        self._ask_if_behind(instance_id)

    def _left(self, instance_id: int) -> None:
        for dp_rank in self._orders.pop(instance_id):
            self._index.remove_worker(api.Worker(instance_id, dp_rank))
        self._unanswered.discard(instance_id)
        if asking := self._asking.pop(instance_id, None):
            asking.cancel()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._tasks.start("sweep the index", self._sweep())

    async def _sweep(self) -> None:
        while not self._index.sweep(_SWEEP_SEGMENTS):
            await self._clock.sleep(0)

    async def _end_restoring(self) -> None:
        await self._clock.sleep(RESTORE_WINDOW_S)
        self._snapshots.clear()

    def _is_behind(self, instance_id: int) -> bool:
        orders = self._orders.get(instance_id, {})
        return instance_id in self._unanswered or any(o.is_behind for o in orders.values())

    def _ask_if_behind(self, instance_id: int) -> None:
        if instance_id not in self._asking and self._is_behind(instance_id):
            self._asking[instance_id] = self._tasks.start(
                f"catch up with {instance_id:x}", self._catch_up(instance_id)
            )

    async def _catch_up(self, instance_id: int) -> None:
        """Ask until nothing is missing. Ends with the worker at the latest."""
        retry_s = FIRST_RETRY_S
        while self._is_behind(instance_id):
            try:
                async with self._questions:
                    await self._ask(instance_id)
            except errors.DynamoError as error:
                _logger.warning("no KV events from %x, will ask again: %s", instance_id, error)
            if self._is_behind(instance_id):
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        del self._asking[instance_id]

    async def _ask(self, instance_id: int) -> None:
        answer = Answer(functools.partial(self._replayed, instance_id))
        asked = [(rank, order.ask()) for rank, order in self._orders[instance_id].items()]
        request = kv_events.ReplayRequest(
            positions={rank: position for rank, position in asked if position is not None}
        )
        stream = await self._client.open(
            request, answer, instance_id=instance_id, timeout_s=ANSWER_LIMIT_S
        )
        try:
            await answer.is_complete
        finally:
            stream.cancel()
        self._unanswered.discard(instance_id)
        for dp_rank in self._orders[instance_id].keys() - answer.ranks:
            del self._orders[instance_id][dp_rank]  # a former life of this worker had it
            self._index.remove_worker(api.Worker(instance_id, dp_rank))


class Answer:
    """The receiver of a replay: gives each part on, and is complete when the stream has ended well."""

    def __init__(self, apply: Callable[[kv_events.ReplayPart], None]) -> None:
        self.is_complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ranks: set[int] = set()  # that were answered for
        self._apply = apply

    def receive(self, output: generate.Output) -> None:
        self._end(errors.RemoteProtocolError("expected KV events, got an engine's output"))

    def replied(self, body: msgspec.Raw) -> None:
        try:
            part = _decode_part(body)
        except msgspec.DecodeError as error:
            self._end(errors.RemoteProtocolError(f"expected a part of a replay: {error}"))
        else:
            self.ranks.add(part.dp_rank)
            self._apply(part)

    def ended(self, error: errors.DynamoError | None) -> None:
        self._end(error)

    def _end(self, error: errors.DynamoError | None) -> None:
        if self.is_complete.done():
            return
        if error is None:
            self.is_complete.set_result(None)
        else:
            self.is_complete.set_exception(error)
