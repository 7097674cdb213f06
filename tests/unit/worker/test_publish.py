"""What a worker tells: KV events without holes, and its load."""

import msgspec
import pytest
from worker_fakes import make_load

from dynamo.base import tasks
from dynamo.protocols import kv_events, load
from dynamo.testing import clock as virtual
from dynamo.worker import publish


class Plane:
    """Remembers what was published."""

    def __init__(self):
        self.advertised, self.published = [], []

    async def advertise(self, topic):
        self.advertised.append(topic)

    def publish(self, topic, payload):
        self.published.append((topic, payload))


@pytest.fixture
def plane():
    return Plane()


@pytest.fixture
def publisher(plane):
    return publish.Publisher(plane, namespace="dynamo", component="backend", worker_id=9, epoch=5)


async def test_both_topics_are_advertised(publisher, plane):
    await publisher.advertise()

    assert plane.advertised == ["dynamo/backend/kv_events", "dynamo/backend/kv_metrics"]


def test_events_are_numbered_across_steps_without_holes(publisher, plane):
    stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(1, 2),))
    publisher.publish_kv_events([stored, kv_events.Removed(block_hashes=(1,))])
    publisher.publish_kv_events([kv_events.Cleared()])
    publisher.publish_kv_events([stored], dp_rank=1)
    told = [msgspec.msgpack.decode(p, type=kv_events.EventBatch) for _, p in plane.published]

    assert [(b.dp_rank, b.first_event_id, len(b.events)) for b in told] == [
        (0, 0, 2),
        (0, 2, 1),
        (1, 0, 1),
    ]
    assert {(batch.worker_id, batch.epoch) for batch in told} == {(9, 5)}
    assert told[0].events[0] == stored
    assert {topic for topic, _ in plane.published} == {"dynamo/backend/kv_events"}


async def test_where_the_numbers_are_is_told_every_second(publisher, plane):
    publisher.publish_kv_events([kv_events.Cleared()])
    clock = virtual.VirtualClock()
    async with tasks.Tasks() as running:
        running.start("publish positions", publisher.publish_positions(clock))
        await clock.advance(2.5)
    told = [msgspec.msgpack.decode(p, type=kv_events.EventBatch) for _, p in plane.published]

    assert [(batch.first_event_id, batch.events) for batch in told[1:]] == [(1, ())] * 3


def replay(publisher, *positions):
    request = kv_events.ReplayRequest(positions=dict(enumerate(positions)))
    return list(publisher.replay(request))


def test_who_missed_little_gets_what_was_missed(publisher):
    publisher.publish_kv_events([kv_events.Cleared(), kv_events.Removed(block_hashes=(1,))])
    parts = replay(publisher, kv_events.Position(5, 1))

    assert [part.events for part in parts] == [(kv_events.Removed(block_hashes=(1,)),), ()]
    assert not any(part.begins_anew for part in parts)
    assert parts[-1].position == kv_events.Position(5, 2)


@pytest.mark.parametrize(
    "positions",
    [(), (kv_events.Position(4, 1),), (kv_events.Position(5, 9),)],
    ids=["heard nothing", "heard an earlier life", "heard what was not told"],
)
def test_who_missed_much_gets_what_is_held(publisher, positions):
    stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(1, 2),))
    publisher.publish_kv_events([kv_events.Cleared(), stored])
    parts = replay(publisher, *positions)

    assert parts == [
        kv_events.ReplayPart(dp_rank=0, begins_anew=True),
        kv_events.ReplayPart(dp_rank=0, events=(stored,)),
        kv_events.ReplayPart(dp_rank=0, position=kv_events.Position(5, 2)),
    ]


def test_every_rank_is_replayed_and_a_large_one_in_parts(publisher):
    blocks = tuple(kv_events.StoredBlock(i, i) for i in range(1, 5001))
    for dp_rank in (0, 1):
        publisher.publish_kv_events(
            [kv_events.Stored(parent_hash=None, blocks=blocks)], dp_rank=dp_rank
        )
    parts = replay(publisher)

    assert max(len(event.blocks) for part in parts for event in part.events) <= 2048
    for dp_rank in (0, 1):
        events = [e for part in parts if part.dp_rank == dp_rank for e in part.events]
        assert [block for event in events for block in event.blocks] == list(blocks)


async def publish_load(publisher, measure, *, for_s):
    clock = virtual.VirtualClock()
    async with tasks.Tasks() as running:
        running.start("publish load", publisher.publish_load(measure, clock))
        await clock.advance(for_s)


async def test_a_load_that_does_not_change_is_told_once_a_second(publisher, plane):
    await publish_load(publisher, lambda: [make_load()], for_s=2.5)

    assert len(plane.published) == 3  # at 0 s, and after each second


async def test_a_load_that_changed_is_told_at_the_next_look(publisher, plane):
    loads = iter([make_load(n)] for n in range(10))
    await publish_load(publisher, lambda: next(loads), for_s=0.25)
    told = [msgspec.msgpack.decode(p, type=load.LoadEvent) for _, p in plane.published]

    assert [event.data.kv_stats.kv_active_blocks for event in told] == [0, 1, 2]
