"""The numbering and the replay of KV events, and the publishing of load."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_fakes import FakeCall, make_load

from dynamo.base import tasks
from dynamo.protocols import blocks, kv_events, load
from dynamo.testing import clock as virtual
from dynamo.worker import kv_event_publisher, kv_event_replays


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
async def publisher(plane):
    publisher = kv_event_publisher.KvEventPublisher(
        plane, namespace="dynamo", component="backend", worker_id=9, epoch=5
    )
    await publisher.advertise()
    return publisher


async def test_both_topics_are_advertised(publisher, plane):
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


def test_long_step_becomes_batches_that_fit_into_messages(publisher, plane):
    hashes = tuple(range(2**63, 2**63 + 100_000))
    stored = kv_events.Stored(
        parent_hash=7, blocks=tuple(kv_events.StoredBlock(name, name) for name in hashes)
    )
    publisher.publish_kv_events(
        [
            stored,
            *[kv_events.Removed(block_hashes=(1,))] * 200,
            kv_events.Removed(block_hashes=hashes),
        ]
    )
    batches = [msgspec.msgpack.decode(p, type=kv_events.EventBatch) for _, p in plane.published]
    ends = [batch.first_event_id + len(batch.events) for batch in batches]
    events = [event for batch in batches for event in batch.events]
    parts = [event for event in events if isinstance(event, kv_events.Stored)]

    assert max(len(payload) for _, payload in plane.published) < 2**18
    assert [0, *ends[:-1]] == [batch.first_event_id for batch in batches]
    assert tuple(block for part in parts for block in part.blocks) == stored.blocks
    assert [part.parent_hash for part in parts] == [
        7,
        *(part.blocks[-1].block_hash for part in parts[:-1]),
    ]
    assert sum(map(kv_event_publisher.count_blocks, events)) == 200_200


async def test_next_event_number_is_published_every_second(publisher, plane):
    publisher.publish_kv_events([kv_events.Cleared()])
    await publish_heartbeats(publisher, lambda: [make_load()], for_s=2.5)
    told = [
        msgspec.msgpack.decode(payload, type=kv_events.EventBatch)
        for topic, payload in plane.published
        if topic.endswith("/kv_events")
    ]

    assert [(batch.first_event_id, batch.events) for batch in told[1:]] == [(1, ())] * 3


def replay(publisher, *positions):
    request = kv_events.ReplayRequest(positions=dict(enumerate(positions)))
    return list(publisher.replay(request))


def test_blocks_that_an_engine_finds_at_its_start_reach_subscribers_by_a_replay(plane):
    publisher = kv_event_publisher.KvEventPublisher(
        plane, namespace="dynamo", component="backend", worker_id=9, epoch=5
    )
    stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(1, 2),))
    publisher.publish_kv_events([stored])  # no topic is advertised yet

    assert plane.published == []
    assert [part.events for part in replay(publisher)] == [(), (stored,), ()]


def test_subscriber_that_missed_few_events_gets_them_again(publisher):
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
def test_subscriber_that_missed_many_events_gets_a_snapshot(publisher, positions):
    stored = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(1, 2),))
    publisher.publish_kv_events([kv_events.Cleared(), stored])
    parts = replay(publisher, *positions)

    assert parts == [
        kv_events.ReplayPart(dp_rank=0, begins_anew=True),
        kv_events.ReplayPart(dp_rank=0, events=(stored,)),
        kv_events.ReplayPart(dp_rank=0, position=kv_events.Position(5, 2)),
    ]


def test_replay_covers_every_rank_and_splits_large_ones(publisher):
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


async def test_all_blocks_go_to_one_subscriber_at_a_time_and_missed_events_at_once(publisher):
    for number in range(9):
        stored = tuple(kv_events.StoredBlock(2048 * number + i, i) for i in range(1, 2049))
        publisher.publish_kv_events([kv_events.Stored(parent_hash=None, blocks=stored)])
    ends = []
    async with tasks.Tasks() as running:
        start = kv_event_replays.replay_handler(publisher, running)
        positions = {"late": {}, "later": {}, "gone": {}, "behind": {0: kv_events.Position(5, 8)}}
        calls = {
            name: FakeCall(kv_events.ReplayRequest(positions=at)) for name, at in positions.items()
        }
        for call in calls.values():
            start(call)
        calls["gone"].cancel()
        while len(ends) < 3:
            await asyncio.sleep(0)
            ends += [name for name, call in calls.items() if call.num_finished and name not in ends]
            assert not (calls["later"].sent and not calls["late"].num_finished)

    assert ends == ["behind", "late", "later"]
    assert calls["later"].sent == calls["late"].sent
    assert calls["gone"].sent == []


class Requests:
    """The requests of a worker, of which the test says how many are open."""

    def __init__(self, num_open):
        self.num_open = num_open
        self.has_arrival = asyncio.Event()

    def __len__(self):
        return self.num_open


async def publish_heartbeats(publisher, measure, *, for_s):
    clock = virtual.VirtualClock()
    async with tasks.Tasks() as running:
        running.start(
            "publish heartbeats", publisher.publish_heartbeats(measure, clock, Requests(1))
        )
        await clock.advance(for_s)


async def test_unchanged_load_is_published_once_a_second(publisher, plane):
    await publish_heartbeats(publisher, lambda: [make_load()], for_s=2.5)

    assert len(plane.published) == 3  # at 0 s, and after each second


async def test_changed_load_is_published_at_the_next_measurement(publisher, plane):
    loads = iter([make_load(n)] for n in range(10))
    await publish_heartbeats(publisher, lambda: next(loads), for_s=0.25)
    told = [msgspec.msgpack.decode(p, type=load.LoadEvent) for _, p in plane.published]

    assert [event.data.kv_stats.kv_active_blocks for event in told] == [0, 1, 2]


CHAIN = st.lists(st.integers(1, 3), min_size=1, max_size=6)
TIER = st.sampled_from(kv_events.TIERS)


def stored(local_hashes, skip, tier):
    names = blocks.sequence_hashes(local_hashes)
    return kv_events.Stored(
        parent_hash=names[skip - 1] if skip else None,
        blocks=tuple(map(kv_events.StoredBlock, names, local_hashes))[skip:],
        tier=tier,
    )


def removed(local_hashes, tier):
    return kv_events.Removed(block_hashes=(blocks.sequence_hashes(local_hashes)[-1],), tier=tier)


EVENT = st.one_of(
    st.builds(stored, CHAIN, st.just(0), TIER),
    st.builds(removed, CHAIN, TIER),
    st.builds(kv_events.Cleared),
)
EVENTS = st.lists(EVENT, max_size=20)


def state(events):
    """What is held after these events."""
    held = {tier: {} for tier in kv_events.TIERS}
    for event in events:
        if isinstance(event, kv_events.Stored):
            parent = event.parent_hash
            for block in event.blocks:
                held[event.tier][block.block_hash] = (parent, block.tokens_hash)
                parent = block.block_hash
        elif isinstance(event, kv_events.Removed):
            for name in event.block_hashes:
                held[event.tier].pop(name, None)
        else:
            held = {tier: {} for tier in kv_events.TIERS}
    return held


def recorded(events):
    log = kv_event_publisher.KvEventLog()
    log.append(events)
    return log


@given(EVENTS)
def test_snapshot_describes_all_blocks_held(events):
    assert state(recorded(events).snapshot()) == state(events)


@given(EVENTS)
def test_snapshot_names_parents_before_children(events):
    told = {tier: set() for tier in kv_events.TIERS}
    held = state(events)
    for event in recorded(events).snapshot():
        if event.parent_hash in held[event.tier]:
            assert event.parent_hash in told[event.tier]
        told[event.tier] |= {block.block_hash for block in event.blocks}


@given(EVENTS, st.integers(0, 25))
def test_events_are_returned_from_any_remembered_number(events, event_id):
    known = event_id <= len(events)

    assert recorded(events).since(event_id) == (events[event_id:] if known else None)


def test_event_numbers_continue_across_steps():
    log = kv_event_publisher.KvEventLog()

    assert [log.append([kv_events.Cleared()] * n) for n in (2, 0, 3)] == [0, 2, 2]
    assert log.next_event_id == 5


def test_old_events_are_forgotten_by_number_and_by_size():
    many = recorded([kv_events.Cleared()] * (kv_event_publisher.RECENT_EVENTS + 1))
    large_event = kv_events.Removed(block_hashes=tuple(range(kv_event_publisher.RECENT_BLOCKS)))
    large = recorded([kv_events.Cleared(), large_event, large_event])

    assert many.since(0) is None
    assert len(many.since(1)) == kv_event_publisher.RECENT_EVENTS
    assert large.since(1) is None
    assert large.since(2) == [large_event]


def test_events_after_the_call_do_not_change_the_snapshot():
    log = recorded([stored([1, 2], 0, kv_events.DEVICE)])
    telling = log.snapshot()
    log.append([kv_events.Cleared()])

    assert len(list(telling)) == 1


def test_block_that_is_its_own_parent_is_described_once():
    loop = kv_events.Stored(parent_hash=7, blocks=(kv_events.StoredBlock(7, 1),))

    assert list(recorded([loop]).snapshot()) == [loop]


async def test_load_of_an_idle_worker_is_measured_for_heartbeats_and_requests_only(publisher):
    clock, times, requests = virtual.VirtualClock(), [], Requests(0)

    def measure():
        times.append(clock.now())
        return [make_load()]

    async with tasks.Tasks() as running:
        running.start("publish heartbeats", publisher.publish_heartbeats(measure, clock, requests))
        await clock.advance(1.5)
        num_idle = len(times)
        requests.has_arrival.set()
        requests.num_open = 1
        await clock.advance(0.05)
        num_with_request = len(times)

    assert num_idle <= 4  # twice until it is known to rest, and for the heartbeat
    assert num_with_request == num_idle + 1


async def test_worker_that_begins_to_drain_says_so_at_once(publisher, plane):
    drains = iter([False, False, True, True])
    clock = virtual.VirtualClock()
    async with tasks.Tasks() as running:
        work = publisher.publish_heartbeats(
            lambda: [make_load()], clock, Requests(1), lambda: next(drains)
        )
        running.start("publish heartbeats", work)
        await clock.advance(0.35)
    told = [msgspec.msgpack.decode(p, type=load.LoadEvent) for _, p in plane.published]

    assert [event.is_draining for event in told] == [False, True]
