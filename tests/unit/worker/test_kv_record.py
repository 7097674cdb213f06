"""A record tells what was missed, or what is held, and both lead to the same state."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import blocks, kv_events
from dynamo.worker import kv_record

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
    record = kv_record.KvRecord()
    record.add(events)
    return record


@given(EVENTS)
def test_what_is_held_is_told_as_events_that_lead_there(events):
    assert state(recorded(events).held()) == state(events)


@given(EVENTS)
def test_parents_are_told_before_their_children(events):
    told = {tier: set() for tier in kv_events.TIERS}
    held = state(events)
    for event in recorded(events).held():
        if event.parent_hash in held[event.tier]:
            assert event.parent_hash in told[event.tier]
        told[event.tier] |= {block.block_hash for block in event.blocks}


@given(EVENTS, st.integers(0, 25))
def test_what_was_missed_is_told_from_any_number_that_is_known(events, event_id):
    known = event_id <= len(events)

    assert recorded(events).since(event_id) == (events[event_id:] if known else None)


def test_numbers_go_on_across_steps():
    record = kv_record.KvRecord()

    assert [record.add([kv_events.Cleared()] * n) for n in (2, 0, 3)] == [0, 2, 2]
    assert record.next_event_id == 5


def test_old_events_are_forgotten_by_number_and_by_size():
    many = recorded([kv_events.Cleared()] * (kv_record.RECENT_EVENTS + 1))
    large_event = kv_events.Removed(block_hashes=tuple(range(kv_record.RECENT_BLOCKS)))
    large = recorded([kv_events.Cleared(), large_event, large_event])

    assert many.since(0) is None
    assert len(many.since(1)) == kv_record.RECENT_EVENTS
    assert large.since(1) is None
    assert large.since(2) == [large_event]


def test_events_after_the_call_change_nothing_in_what_is_being_told():
    record = recorded([stored([1, 2], 0, kv_events.DEVICE)])
    telling = record.held()
    record.add([kv_events.Cleared()])

    assert len(list(telling)) == 1


def test_an_engine_that_names_a_block_its_own_parent_stops_nobody():
    loop = kv_events.Stored(parent_hash=7, blocks=(kv_events.StoredBlock(7, 1),))

    assert list(recorded([loop]).held()) == [loop]
