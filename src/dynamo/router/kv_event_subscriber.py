"""The KV event subscriber: it keeps a prefix index equal to the caches of the workers of one component.

It subscribes to their KV events, follows in discovery which workers can replay them, and asks a worker for a replay:
when it appears (all its blocks), and whenever its event numbers show a gap (`kv_event_order`). A worker that vanishes
from discovery is removed at once; its late events are ignored.

Each worker publishes at least a heartbeat a second. Of one that is silent for `SILENCE_S`, although discovery names it,
the connection is made anew and the missing events are asked for, again and again while it lasts: the request plane may
work where the event plane does not. Seconds in which this process stood still do not count.

At most one replay per worker runs at a time, and `MAX_REPLAYS` in all; a failed one is retried, ever more slowly.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import instances, kv_events, wire
from dynamo.router import api, kv_event_order, prefix_index
from dynamo.runtime import authentication, component, events

MAX_REPLAYS = 8
REPLAY_TIMEOUT_S = 60.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
SILENCE_S = 5.0
_WATCH_S = 1.0
_SWEPT_EDGES = 16  # in one turn of the event loop

_logger = logging.getLogger(__name__)
_decode_batch = msgspec.msgpack.Decoder(kv_events.EventBatch).decode


class CountEvent(Protocol):
    """Counts a KV event by its kind."""

    def __call__(self, event_type: str, *, is_applied: bool) -> None:
        """Count an event that the index took, or could not."""
        ...


class KvEventSubscriber:
    """Applies KV events to `index`. Call `start` once, and `close` before the runtime is closed."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        index: prefix_index.PrefixIndex,
        *,
        namespace: str,
        component_name: str,
        clock: clocks.Clock,
        on_age: Callable[[int, float | None], None] = lambda instance_id, age_s: None,
        count_event: CountEvent = lambda event_type, *, is_applied: None,
    ) -> None:
        """`on_age` gets the seconds since an instance was heard, each second, and None when it is gone."""
        self._runtime = runtime
        self._index = index
        self._topic = f"{namespace}/{component_name}/kv_events"
        self._clock = clock
        self._client = runtime.client(
            instances.EndpointName(namespace, component_name, instances.KV_EVENTS_REPLAY)
        )
        self._orders: dict[int, dict[int, kv_event_order.KvEventOrder]] = {}  # by instance, by rank
        self._on_age = on_age
        self._count_event = count_event
        self._heard_at: dict[int, float] = {}  # by instance
        self._publishers: dict[int, int] = {}  # by instance: the process whose event plane it uses
        self._recovered_at: dict[int, float] = {}  # of the silent ones: the last attempt
        self._unanswered: set[int] = set()  # instances without one complete replay
        self._replays: dict[int, asyncio.Task[None]] = {}
        self._replay_slots = asyncio.Semaphore(MAX_REPLAYS)
        self._sweeping: asyncio.Task[None] | None = None
        self._tasks = tasks.Tasks()
        self._subscription: events.Subscription | None = None
        self._log = authentication.RefusalLog(_logger, clock.now)

    async def start(self) -> None:
        """Subscribe to the KV events, and ask the workers that are there for all their blocks."""
        self._subscription = await self._runtime.events.subscribe(self._topic, self._on_events)
        self._client.on_change(self._update_instances)
        self._update_instances()
        self._tasks.start("watch the silence of workers", self._watch_silence())

    async def close(self) -> None:
        """Unsubscribe and stop all replays; the index stays as it is."""
        if self._subscription is not None:
            await self._subscription.close()
        await self._client.close()
        await self._tasks.close()

    @property
    def is_current(self) -> bool:
        """Return True if no event of any registered worker is known to be missing."""
        return not self._unanswered and not any(
            order.is_behind for orders in self._orders.values() for order in orders.values()
        )

    def _on_events(self, messages: list[events.Event]) -> None:
        for event in messages:
            try:
                batch = _decode_batch(event.payload)
            except wire.DECODE_ERRORS as error:
                self._log_ignored(event.publisher, error)
                continue
            if batch.worker_id not in self._orders:
                continue  # it is lost; or it is about to appear, and will be asked for all blocks
            self._heard_at[batch.worker_id] = self._clock.now()
            self._publishers[batch.worker_id] = event.publisher
            order = self._order(batch.worker_id, batch.dp_rank)
            self._apply(api.Worker(batch.worker_id, batch.dp_rank), order.apply_batch(batch))
            if order.is_behind:
                self._replay_if_behind(batch.worker_id)

    def _on_replay(self, instance_id: int, part: kv_events.ReplayPart) -> None:
        if instance_id in self._orders:
            order = self._order(instance_id, part.dp_rank)
            self._apply(api.Worker(instance_id, part.dp_rank), order.apply_replay(part))

    def _apply(self, worker: api.Worker, worker_events: Sequence[kv_events.KvEvent]) -> None:
        for event in worker_events:
            is_applied = True
            try:
                self._index.apply(worker, event)
            except errors.RemoteProtocolError as error:
                self._log_ignored(worker.instance_id, error)
                is_applied = False
            self._count_event(type(event).__name__.lower(), is_applied=is_applied)

    def _log_ignored(self, instance_id: int, error: Exception) -> None:
        self._log.warning(f"{instance_id:x}", "ignored a KV event of %x: %s", instance_id, error)

    def _order(self, instance_id: int, dp_rank: int) -> kv_event_order.KvEventOrder:
        return self._orders[instance_id].setdefault(dp_rank, kv_event_order.KvEventOrder())

    def _update_instances(self) -> None:
        for instance_id in self._orders.keys() - self._client.instances.keys():
            self._remove_instance(instance_id)
        for instance_id in self._client.instances.keys() - self._orders.keys():
            self._orders[instance_id] = {}
            self._unanswered.add(instance_id)
            self._replay_if_behind(instance_id)

    def _remove_instance(self, instance_id: int) -> None:
        for dp_rank in self._orders.pop(instance_id):
            self._index.remove_worker(api.Worker(instance_id, dp_rank))
        self._unanswered.discard(instance_id)
        self._heard_at.pop(instance_id, None)
        self._recovered_at.pop(instance_id, None)
        self._publishers.pop(instance_id, None)
        self._on_age(instance_id, None)
        if replay := self._replays.pop(instance_id, None):
            replay.cancel()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._tasks.start("sweep the index", self._sweep())

    async def _watch_silence(self) -> None:
        checked_at = self._clock.now()
        while True:
            await self._clock.sleep(_WATCH_S)
            now = self._clock.now()
            if (late_s := now - checked_at - _WATCH_S) > _WATCH_S:
                self._heard_at = {key: at + late_s for key, at in self._heard_at.items()}
            checked_at = now
            for instance_id, orders in self._orders.items():
                if orders:  # a worker without any rank has nothing to say
                    age_s = now - self._heard_at.setdefault(instance_id, now)
                    self._on_age(instance_id, age_s)
                    self._check_silence(instance_id, age_s, now)

    def _check_silence(self, instance_id: int, age_s: float, now: float) -> None:
        if age_s < SILENCE_S:
            if self._recovered_at.pop(instance_id, None) is not None:
                _logger.info("the events of worker %x are heard again", instance_id)
            return
        recovered_at = self._recovered_at.get(instance_id)
        if recovered_at is None:
            _logger.warning(
                "no event of worker %x for %.0f s, though discovery names it: connecting anew, and asking it by the"
                " request plane meanwhile (topic %s)",
                instance_id, age_s, self._topic,
            )  # fmt: skip
        elif now - recovered_at < SILENCE_S:
            return
        self._recovered_at[instance_id] = now
        publisher = self._publishers.get(instance_id, instance_id)
        self._runtime.events.reconnect(self._topic, publisher)
        for order in self._orders[instance_id].values():
            order.expect_gap()
        self._replay_if_behind(instance_id)

    async def _sweep(self) -> None:
        while not self._index.sweep(_SWEPT_EDGES):
            await self._clock.sleep(0)

    def _is_behind(self, instance_id: int) -> bool:
        orders = self._orders.get(instance_id, {})
        return instance_id in self._unanswered or any(o.is_behind for o in orders.values())

    def _replay_if_behind(self, instance_id: int) -> None:
        if instance_id not in self._replays and self._is_behind(instance_id):
            self._replays[instance_id] = self._tasks.start(
                f"replay of {instance_id:x}", self._replay_until_current(instance_id)
            )

    async def _replay_until_current(self, instance_id: int) -> None:
        """Ask a worker for replays until no event is missing; cancelled when the worker vanishes."""
        retry_s = FIRST_RETRY_S
        while self._is_behind(instance_id):
            try:
                async with self._replay_slots:
                    await self._request_replay(instance_id)
            except errors.DynamoError as error:
                worker = f"{instance_id:x}"
                self._log.warning(worker, "no KV events from %s, will ask again: %s", worker, error)
            if self._is_behind(instance_id):
                await self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        del self._replays[instance_id]

    async def _request_replay(self, instance_id: int) -> None:
        positions = {
            rank: order.begin_replay() for rank, order in self._orders[instance_id].items()
        }
        request = kv_events.ReplayRequest(
            positions={rank: position for rank, position in positions.items() if position}
        )
        parts = self._client.stream(
            request,
            item_type=kv_events.ReplayPart,
            instance_id=instance_id,
            timeout_s=REPLAY_TIMEOUT_S,
        )
        answered_ranks = set()
        async with contextlib.aclosing(parts):
            async for part in parts:
                answered_ranks.add(part.dp_rank)
                self._on_replay(instance_id, part)
        self._unanswered.discard(instance_id)
        for dp_rank in self._orders[instance_id].keys() - answered_ranks:
            del self._orders[instance_id][dp_rank]  # a rank of an earlier life of the worker
            self._index.remove_worker(api.Worker(instance_id, dp_rank))
