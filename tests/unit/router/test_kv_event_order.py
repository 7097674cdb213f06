"""Whatever is lost, doubled or begun anew: in the end we know what the worker holds."""

import asyncio

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.protocols import blocks, kv_events
from dynamo.router import kv_event_order
from dynamo.worker import kv_event_publisher

STORED = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(1, 1),))
REMOVED = kv_events.Removed(block_hashes=(1,))
CLEARED = kv_events.Cleared()


def batch(first, *events, epoch=1):
    return kv_events.EventBatch(worker_id=9, epoch=epoch, first_event_id=first, events=events)


def part(*events, at=None, epoch=1, anew=False):
    position = None if at is None else kv_events.Position(epoch, at)
    return kv_events.ReplayPart(dp_rank=0, events=events, begins_anew=anew, position=position)


def caught_up(at=0, epoch=1):
    order = kv_event_order.KvEventOrder()
    order.apply_replay(part(anew=True))
    order.apply_replay(part(at=at, epoch=epoch))
    return order


def test_no_event_is_applied_before_the_first_replay():
    order = kv_event_order.KvEventOrder()

    assert order.is_behind
    assert order.apply_batch(batch(0, STORED)) == ()
    assert order.begin_replay() is None


def test_repeated_events_are_applied_once():
    order = caught_up()

    assert order.apply_batch(batch(0, STORED, REMOVED)) == (STORED, REMOVED)
    assert order.apply_batch(batch(0, STORED, REMOVED)) == ()
    assert order.apply_batch(batch(1, REMOVED, CLEARED)) == (CLEARED,)
    assert not order.is_behind


def test_events_after_a_gap_wait_for_the_whole_replay():
    order = caught_up()
    held_back = order.apply_batch(batch(2, CLEARED))
    position = order.begin_replay()
    first = order.apply_replay(part(STORED))
    rest = order.apply_replay(part(REMOVED, at=2))

    assert (held_back, position, first) == ((), kv_events.Position(1, 0), ())
    assert rest == [STORED, REMOVED, CLEARED]
    assert not order.is_behind


def test_heartbeat_reveals_a_lost_last_batch():
    order = caught_up(at=3)
    order.apply_batch(batch(4))

    assert order.is_behind


def test_broken_replay_of_missed_events_applies_none():
    order = caught_up()
    order.apply_batch(batch(2, CLEARED))
    order.begin_replay()
    order.apply_replay(part(STORED))
    position = order.begin_replay()
    answered = order.apply_replay(part(STORED, REMOVED, at=2))

    assert position == kv_events.Position(1, 0)
    assert answered == [STORED, REMOVED, CLEARED]


def test_new_epoch_clears_earlier_blocks():
    order = caught_up(at=7)

    assert order.apply_batch(batch(0, STORED, epoch=2)) == (CLEARED, STORED)
    assert order.apply_batch(batch(1, REMOVED, epoch=2)) == (REMOVED,)


def test_batches_during_a_replay_are_applied_after_it():
    order = caught_up()
    order.begin_replay()
    meanwhile = order.apply_batch(batch(0, STORED, REMOVED))

    assert meanwhile == ()
    assert order.apply_replay(part(STORED, at=1)) == [STORED, REMOVED]


def test_waiting_batches_of_an_earlier_epoch_are_dropped():
    order = kv_event_order.KvEventOrder()
    order.apply_batch(batch(5, STORED, epoch=1))
    order.apply_replay(part(anew=True))

    assert order.apply_replay(part(at=3, epoch=2)) == []
    assert order.position == kv_events.Position(2, 3)
    assert not order.is_behind


def test_broken_full_replay_starts_again_from_nothing():
    order = caught_up(at=7)
    order.begin_replay()

    assert list(order.apply_replay(part(anew=True))) == [CLEARED]
    assert order.begin_replay() is None


def test_waiting_batches_are_bounded_and_the_gap_is_noticed():
    order = kv_event_order.KvEventOrder()
    for number in range(kv_event_order.MAX_WAITING + 1):
        order.apply_batch(batch(number, STORED))
    order.apply_replay(part(anew=True))

    assert order.apply_replay(part(at=1)) == []
    assert order.is_behind


class Line:
    """From a publisher that may begin anew, over a plane that loses and doubles, to an order."""

    def __init__(self):
        self.epoch, self.sent, self.held = 0, [], {}
        self.order = kv_event_order.KvEventOrder()
        self.begin_anew()

    def begin_anew(self):
        self.epoch += 1
        self.publisher = kv_event_publisher.KvEventPublisher(
            self, namespace="n", component="c", worker_id=9, epoch=self.epoch
        )
        asyncio.run(self.publisher.advertise())
        self.publisher.publish_kv_events([])

    async def advertise(self, topic):
        """Do nothing: there is one subscriber."""

    def publish(self, topic, payload):
        self.sent.append(msgspec.msgpack.decode(payload, type=kv_events.EventBatch))

    def tell(self, chains):
        self.publisher.publish_kv_events([event(*chain) for chain in chains])

    def deliver(self, times):
        if self.sent:
            message = self.sent.pop(0)
            for _ in range(times):
                self.apply(self.order.apply_batch(message))

    def replay(self, num_parts):
        """Ask; the answer breaks off after so many parts."""
        position = self.order.begin_replay()
        request = kv_events.ReplayRequest(positions={} if position is None else {0: position})
        for told in list(self.publisher.replay(request))[:num_parts]:
            self.apply(self.order.apply_replay(told))

    def apply(self, events):
        for told in events:
            apply_to(self.held, told)


def event(chain, is_stored):
    names = blocks.sequence_hashes(chain)
    if not is_stored:
        return kv_events.Removed(block_hashes=(names[-1],))
    pairs = tuple(map(kv_events.StoredBlock, names, chain))
    return kv_events.Stored(parent_hash=None, blocks=pairs)


def apply_to(held, told):
    match told:
        case kv_events.Stored():
            held.update((block.block_hash, block.tokens_hash) for block in told.blocks)
        case kv_events.Removed():
            for name in told.block_hashes:
                held.pop(name, None)
        case kv_events.Cleared():
            held.clear()


CHAIN = st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=3), st.booleans())
STEP = st.one_of(
    st.tuples(st.just("tell"), st.lists(CHAIN, max_size=3)),
    st.tuples(st.just("deliver"), st.sampled_from((0, 1, 1, 2))),
    st.tuples(st.just("replay"), st.integers(0, 4)),
    st.tuples(st.just("begin_anew")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=30))
def test_index_equals_the_worker_after_any_losses(steps):
    line = Line()
    for name, *arguments in steps:
        getattr(line, name)(*arguments)
    line.tell([])  # a sign of life, which is what shows that the last message was lost
    while line.sent:
        line.deliver(1)
    for _ in range(3):  # old messages that waited may mislead once
        if line.order.is_behind:
            line.replay(None)
    holds = {}
    for told in line.publisher.replay(kv_events.ReplayRequest()):
        for one in told.events:
            apply_to(holds, one)

    assert not line.order.is_behind
    assert line.held == holds
