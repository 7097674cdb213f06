"""The KV event publisher of one worker: which KV blocks its engine holds, and how busy each of its ranks is.

KV events are numbered per data-parallel rank, from 0 without holes, and are sent as one batch per engine step, or as
several where one might be too long for the event plane. A router that sees a hole knows that it missed events and asks
for them again (`replay`), which `KvEventLog` makes possible. A number alone shows neither that a worker restarted nor
that the last message was lost. Therefore each run of a worker has its own *epoch*, and the next number is published
every `HEARTBEAT_S` seconds.

Load is published when it changes, at most every `LOAD_INTERVAL_S` and at least every `HEARTBEAT_S` seconds, so that a
router can tell an idle worker from one that it cannot hear. Both have one heartbeat, for which an idle process wakes up
once: a wake-up costs more than what is done in it.
"""  # decider

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from dynamo.base import clock as clocks
from dynamo.protocols import kv_events, load

LOAD_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0
RECENT_EVENTS = 4096  # events kept for a replay, unless they hold more than RECENT_BLOCKS blocks
RECENT_BLOCKS = 1 << 16
PART_EVENTS = 64  # events in one message
PART_BLOCKS = 2048  # blocks in one event; a message with so many gets no further event
_Origin = tuple[int | None, int]  # hash of the parent block, hash of the block's tokens


class Topics(Protocol):
    """The part of `runtime.events.EventPlane` that publishing needs."""

    async def advertise(self, topic: str) -> None: ...

    def publish(self, topic: str, payload: bytes) -> None: ...


class Wakeup(Protocol):
    """The part of `asyncio.Event` that publishing needs."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self) -> object: ...


class OpenRequests(Protocol):
    """The part of `worker.inflight.InFlight` that publishing needs."""

    def __len__(self) -> int: ...

    @property
    def has_arrival(self) -> Wakeup: ...


class KvEventPublisher:
    """Publishes the events and the load of one worker during one run (epoch) of it."""

    def __init__(
        self,
        plane: Topics,
        *,
        namespace: str,
        component: str,
        worker_id: int,
        epoch: int,
    ) -> None:
        self._plane = plane
        self._worker_id = worker_id
        self._epoch = epoch
        self._kv_topic = f"{namespace}/{component}/kv_events"
        self._load_topic = f"{namespace}/{component}/kv_metrics"
        self._log_by_rank: dict[int, KvEventLog] = {}
        self._is_advertised = False
        self._encode = msgspec.msgpack.Encoder().encode

    async def advertise(self) -> None:
        """Register both topics in discovery; call this before load and positions are published."""
        await self._plane.advertise(self._kv_topic)
        await self._plane.advertise(self._load_topic)
        self._is_advertised = True

    def publish_kv_events(self, step: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """Publish the blocks that one engine step of one rank stored and removed, in order.

        An engine finds those of its disk before the topics are registered: subscribers ask for these, when the first
        position shows them that they have missed some.
        """
        log = self._log_by_rank.setdefault(dp_rank, KvEventLog())
        short_events = [part for event in step for part in _split_blocks(event)]
        first_event_id = log.append(short_events)
        if self._is_advertised:
            for part in list(_split_events(short_events)) or [()]:  # none: a sign of life
                self._publish_batch(dp_rank, first_event_id, part)
                first_event_id += len(part)

    def cached_blocks(self) -> Iterator[tuple[int, tuple[kv_events.Stored, ...]]]:
        """Yield each rank with the blocks that it holds."""
        for dp_rank, log in self._log_by_rank.items():
            yield dp_rank, tuple(log.snapshot())

    async def publish_heartbeats(
        self,
        measure: Callable[[], Sequence[load.ForwardPassMetrics]],
        clock: clocks.Clock,
        requests: OpenRequests,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """Publish each rank's load, as `measure` returns it, and its next event number, until cancelled.

        While no request is open and the load stays the same, it is measured for heartbeats and new requests only.
        """
        published: tuple[Sequence[load.ForwardPassMetrics], bool] = (), False
        due_at = clock.now()
        while True:
            requests.has_arrival.clear()
            current = ranks, drains = measure(), is_draining()
            is_idle, is_due = not requests and current == published, clock.now() >= due_at
            if is_due:
                due_at = clock.now() + HEARTBEAT_S
                for dp_rank, log in self._log_by_rank.items():
                    self._publish_batch(dp_rank, log.next_event_id)
            if is_due or current != published:
                for metrics in ranks:
                    event = load.LoadEvent(
                        worker_id=self._worker_id, data=metrics, is_draining=drains
                    )
                    self._plane.publish(self._load_topic, self._encode(event))
                published = current
            if is_idle:
                timer = clock.call_later(due_at - clock.now(), requests.has_arrival.set)
                await requests.has_arrival.wait()
                timer.cancel()
            else:
                await clock.sleep(LOAD_INTERVAL_S)

    def replay(self, request: kv_events.ReplayRequest) -> Iterator[kv_events.ReplayPart]:
        """Yield what a subscriber at `request.positions` missed, rank by rank.

        The state of a rank is that of the moment in which its first part is taken.
        """
        for dp_rank, log in list(self._log_by_rank.items()):
            yield from self._replay_rank(dp_rank, log, request.positions.get(dp_rank))

    def begins_anew(self, request: kv_events.ReplayRequest) -> bool:
        """Return whether `replay` yields all blocks of some rank: its events since that position are not kept."""
        pairs = ((log, request.positions.get(rank)) for rank, log in self._log_by_rank.items())
        return any(self._since(log, position) is None for log, position in pairs)

    def _since(
        self, log: "KvEventLog", position: kv_events.Position | None
    ) -> list[kv_events.KvEvent] | None:
        """Return the events of a rank that a subscriber missed; None if they are not kept."""
        if position is None or position.epoch != self._epoch:
            return None
        return log.since(position.next_event_id)

    def _publish_batch(
        self, dp_rank: int, first_event_id: int, step: Sequence[kv_events.KvEvent] = ()
    ) -> None:
        batch = kv_events.EventBatch(
            worker_id=self._worker_id,
            epoch=self._epoch,
            dp_rank=dp_rank,
            first_event_id=first_event_id,
            events=tuple(step),
        )
        self._plane.publish(self._kv_topic, self._encode(batch))

    def _replay_rank(
        self, dp_rank: int, log: "KvEventLog", position: kv_events.Position | None
    ) -> Iterator[kv_events.ReplayPart]:
        end = kv_events.Position(self._epoch, log.next_event_id)
        events: Iterable[kv_events.KvEvent] | None = self._since(log, position)
        if events is None:
            events = log.snapshot()
            yield kv_events.ReplayPart(dp_rank=dp_rank, begins_anew=True)
        for part in _split_events(events):
            yield kv_events.ReplayPart(dp_rank=dp_rank, events=part)
        yield kv_events.ReplayPart(dp_rank=dp_rank, position=end)


class KvEventLog:
    """The latest events of one rank, numbered from 0, and the blocks that the rank holds after all of them.

    A subscriber that missed a few events gets these again (`since`). One that missed more, or joins late, gets all
    blocks held (`snapshot`) as Stored events. Both are split, so that a large cache does not block the event loop.
    """

    def __init__(self) -> None:
        self.next_event_id = 0
        self._recent: deque[kv_events.KvEvent] = deque()
        self._num_recent_blocks = 0
        self._origins_by_tier: dict[kv_events.Tier, dict[int, _Origin]] = {
            tier: {} for tier in kv_events.TIERS
        }

    def append(self, events: Sequence[kv_events.KvEvent]) -> int:
        """Record new events and return the number of the first."""
        first_event_id = self.next_event_id
        for event in events:
            self._recent.append(event)
            self._num_recent_blocks += count_blocks(event)
            self._apply(event)
        self.next_event_id += len(events)
        while len(self._recent) > RECENT_EVENTS or self._num_recent_blocks > RECENT_BLOCKS:
            self._num_recent_blocks -= count_blocks(self._recent.popleft())
        return first_event_id

    def since(self, event_id: int) -> list[kv_events.KvEvent] | None:
        """Return the events from this number on; None if some are forgotten or the number never existed."""
        oldest = self.next_event_id - len(self._recent)
        if not oldest <= event_id <= self.next_event_id:
            return None
        return [self._recent[i] for i in range(event_id - oldest, len(self._recent))]

    def snapshot(self) -> Iterator[kv_events.Stored]:
        """Yield all blocks held at the time of the call, parents before children, whatever is appended later."""
        copies = [
            (tier, dict(origins)) for tier, origins in self._origins_by_tier.items() if origins
        ]
        return (event for tier, origins in copies for event in _stored_events(tier, origins))

    def _apply(self, event: kv_events.KvEvent) -> None:
        match event:
            case kv_events.Stored(parent_hash=parent, blocks=blocks, tier=tier):
                origins = self._origins_by_tier.setdefault(tier, {})
                for block in blocks:
                    origins[block.block_hash] = (parent, block.tokens_hash)
                    parent = block.block_hash
            case kv_events.Removed(block_hashes=block_hashes, tier=tier):
                origins = self._origins_by_tier.get(tier, {})
                for block_hash in block_hashes:
                    origins.pop(block_hash, None)
            case kv_events.Cleared():
                for origins in self._origins_by_tier.values():
                    origins.clear()


def count_blocks(event: kv_events.KvEvent) -> int:
    """Return how many blocks an event names."""
    match event:
        case kv_events.Stored(blocks=blocks):
            return len(blocks)
        case kv_events.Removed(block_hashes=block_hashes):
            return len(block_hashes)
        case _:
            return 0


def _split_blocks(event: kv_events.KvEvent) -> Iterator[kv_events.KvEvent]:
    """Yield an event as events of at most PART_BLOCKS blocks, of which each fits into one message."""
    match event:
        case kv_events.Stored(parent_hash=parent, blocks=blocks, tier=tier):
            for start in range(0, len(blocks), PART_BLOCKS):
                part = blocks[start : start + PART_BLOCKS]
                yield kv_events.Stored(parent_hash=parent, blocks=part, tier=tier)
                parent = part[-1].block_hash
        case kv_events.Removed(block_hashes=block_hashes, tier=tier):
            for start in range(0, len(block_hashes), PART_BLOCKS):
                yield kv_events.Removed(
                    block_hashes=block_hashes[start : start + PART_BLOCKS], tier=tier
                )
        case _:
            yield event


def _split_events(events: Iterable[kv_events.KvEvent]) -> Iterator[tuple[kv_events.KvEvent, ...]]:
    """Group events so that each group fits into one message, by number of events and of blocks."""
    group: list[kv_events.KvEvent] = []
    num_blocks = 0
    for event in events:
        group.append(event)
        num_blocks += count_blocks(event)
        if len(group) == PART_EVENTS or num_blocks >= PART_BLOCKS:
            yield tuple(group)
            group, num_blocks = [], 0
    if group:
        yield tuple(group)


def _stored_events(tier: kv_events.Tier, origins: dict[int, _Origin]) -> Iterator[kv_events.Stored]:
    """Describe each chain of blocks by Stored events of at most PART_BLOCKS blocks; empties `origins`.

    Youngest block first: from the end of a chain all of the chain is found at once.
    """
    for block_hash in reversed(list(origins)):
        chain = _chain_to(block_hash, origins)
        for start in range(0, len(chain), PART_BLOCKS):
            part = chain[start : start + PART_BLOCKS]
            parent = origins[part[0]][0]
            blocks = tuple(kv_events.StoredBlock(name, origins.pop(name)[1]) for name in part)
            yield kv_events.Stored(parent_hash=parent, blocks=blocks, tier=tier)


def _chain_to(block_hash: int | None, origins: dict[int, _Origin]) -> list[int]:
    """Return this block and its ancestors that are in `origins`, oldest first; survives a cycle of parents."""
    chain: dict[int, None] = {}
    while block_hash is not None and block_hash in origins and block_hash not in chain:
        chain[block_hash] = None
        block_hash = origins[block_hash][0]
    return list(reversed(chain))
