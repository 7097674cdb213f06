"""What a worker tells to whoever listens: which KV blocks it holds, and how busy it is.

KV events are numbered per data-parallel rank from 0 without holes and go out as one batch per engine step, so that a
router that sees a hole knows that it missed something; `kv_record` remembers enough to tell it again (`replay`). A
number alone cannot show that a worker began anew, nor that the last message was lost: so each life of a worker has its
*epoch*, and where the numbers are is told every `HEARTBEAT_S`.

Load goes out when it changed, but at most every `LOAD_INTERVAL_S`, and at least every `HEARTBEAT_S`, so that a
router can tell an idle worker from one that it no longer hears.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.protocols import kv_events, load
from dynamo.runtime import events
from dynamo.worker import kv_record

LOAD_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0
PART_EVENTS = 64


class Publisher:
    """Speaks for one worker, in one of its lives."""

    def __init__(
        self,
        plane: events.EventPlane,
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
        self._records: dict[int, kv_record.KvRecord] = {}  # by dp_rank
        self._encode = msgspec.msgpack.Encoder().encode

    async def advertise(self) -> None:
        """Become known; before anything is published."""
        await self._plane.advertise(self._kv_topic)
        await self._plane.advertise(self._load_topic)

    def publish_kv_events(self, step: Sequence[kv_events.KvEvent], dp_rank: int = 0) -> None:
        """What one engine step of one rank stored and removed."""
        record = self._records.setdefault(dp_rank, kv_record.KvRecord())
        self._tell(dp_rank, record.add(step), step)

    async def publish_positions(self, clock: clocks.Clock) -> None:
        """Tell how far the numbers are, for as long as the worker lives."""
        while True:
            for dp_rank, record in self._records.items():
                self._tell(dp_rank, record.next_event_id)
            await clock.sleep(HEARTBEAT_S)

    def replay(self, request: kv_events.ReplayRequest) -> Iterator[kv_events.ReplayPart]:
        """What the asker has not heard of any rank. As of now, for each rank at its first part."""
        for dp_rank, record in list(self._records.items()):
            yield from self._replay(dp_rank, record, request.positions.get(dp_rank))

    async def publish_load(
        self, measure: Callable[[], Sequence[load.ForwardPassMetrics]], clock: clocks.Clock
    ) -> None:
        """Tell the load of each rank for as long as the worker lives."""
        told: Sequence[load.ForwardPassMetrics] = ()
        told_at = clock.now()
        while True:
            current = measure()
            if current != told or clock.now() - told_at >= HEARTBEAT_S:
                for state in current:
                    event = load.LoadEvent(worker_id=self._worker_id, data=state)
                    self._plane.publish(self._load_topic, self._encode(event))
                told, told_at = current, clock.now()
            await clock.sleep(LOAD_INTERVAL_S)

    def _tell(
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

    def _replay(
        self, dp_rank: int, record: kv_record.KvRecord, heard: kv_events.Position | None
    ) -> Iterator[kv_events.ReplayPart]:
        now = kv_events.Position(self._epoch, record.next_event_id)
        missed = None
        if heard is not None and heard.epoch == self._epoch:
            missed = record.since(heard.next_event_id)
        told = record.held() if missed is None else missed
        if missed is None:
            yield kv_events.ReplayPart(dp_rank=dp_rank, begins_anew=True)
        for piece in _pieces(told):
            yield kv_events.ReplayPart(dp_rank=dp_rank, events=piece)
        yield kv_events.ReplayPart(dp_rank=dp_rank, position=now)


def _pieces(told: Iterable[kv_events.KvEvent]) -> Iterator[tuple[kv_events.KvEvent, ...]]:
    """Few enough events and blocks for one message."""
    piece: list[kv_events.KvEvent] = []
    num_blocks = 0
    for event in told:
        piece.append(event)
        num_blocks += kv_record.num_blocks(event)
        if len(piece) == PART_EVENTS or num_blocks >= kv_record.PART_BLOCKS:
            yield tuple(piece)
            piece, num_blocks = [], 0
    if piece:
        yield tuple(piece)
