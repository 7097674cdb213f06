"""One tier's slots: what can be found, what is evicted, and when a slot is free."""

from dynamo.kvbm import pool as pools
from dynamo.kvbm import tiers
from dynamo.protocols import generate, kv_events


def block(name, parent=None):
    return tiers.CachedBlock(name, name + 1000, parent)


def make_tier(num_slots=2, **options):
    return tiers.Tier(kv_events.HOST, num_slots, pools.EventLog(), **options)


def store(tier, *names, priority=0):
    for name in names:
        tier.confirm(tier.reserve((block(name),), priority))


def held(tier, *names):
    return [name for name in names if tier.find(name)]


def test_block_is_found_only_when_its_copy_has_ended_well():
    tier = make_tier()
    reserved = tier.reserve((block(1),), 0)
    before = tier.find(1)
    tier.confirm(reserved)

    assert before is None
    assert tier.find(1) is reserved


def test_failed_copy_frees_its_slot():
    tier = make_tier(1)
    reserved = tier.reserve((block(1),), 0)
    tier.drop(reserved)
    tier.release(reserved)
    store(tier, 2)

    assert held(tier, 1, 2) == [2]


def test_block_used_longest_ago_is_evicted_first():
    tier = make_tier(3)
    store(tier, 1, 2, 3)
    tier.touch([1])
    store(tier, 4)

    assert held(tier, 1, 2, 3, 4) == [1, 3, 4]


def test_lowest_priority_is_evicted_before_age_counts():
    tier = make_tier(2)
    store(tier, 1, priority=1)
    store(tier, 2, priority=0)
    store(tier, 3, priority=1)

    assert held(tier, 1, 2, 3) == [1, 3]


def test_block_of_higher_priority_is_not_evicted_for_a_lower_one():
    tier = make_tier(1)
    store(tier, 1, priority=1)

    assert tier.reserve((block(2),), 0) is None
    assert held(tier, 1) == [1]


def test_block_that_no_request_uses_loses_its_priority_after_a_while():
    tier = make_tier(2)
    store(tier, 1, priority=1)
    store(tier, 2, priority=1)
    tier.now = tiers.PRIORITY_S
    tier.touch([2])

    assert tier.reserve((block(3),), -1) is None
    store(tier, 3)
    assert held(tier, 1, 2, 3) == [2, 3]
    assert tier.reserve((block(4),), 0) is not None
    assert held(tier, 2, 3) == [2]


def test_block_that_a_copy_reads_is_not_evicted():
    tier = make_tier(1)
    store(tier, 1)
    tier.acquire(tier.find(1))

    assert tier.reserve((block(2),), 0) is None


def test_slot_of_a_dropped_block_is_free_after_its_last_reader():
    tier = make_tier(1)
    store(tier, 1)
    reader = tier.acquire(tier.find(1))
    tier.drop(reader)
    during = tier.reserve((block(2),), 0)
    tier.release(reader)

    assert during is None
    assert tier.reserve((block(2),), 0) is not None


def test_block_that_was_cleared_during_its_copy_is_not_entered():
    tier = make_tier(1)
    reserved = tier.reserve((block(1),), 0)
    tier.clear()

    assert not tier.confirm(reserved)
    assert tier.num_used == 0
    assert held(tier, 1) == []


def test_slots_are_used_as_they_are_added():
    tier = make_tier(3, num_usable=0)
    before = tier.reserve((block(1),), 0)
    tier.add_slots(2)
    store(tier, 1, 2)

    assert before is None
    assert held(tier, 1, 2) == [1, 2]
    assert tier.num_usable == 2


def test_common_block_of_two_segments_is_published_once_and_removed_with_the_last():
    log = pools.EventLog()
    tier = tiers.Tier(kv_events.REMOTE, 2, log, segment_blocks=2)
    for last in (2, 3):
        tier.confirm(tier.reserve((block(1), block(last, parent=1)), 0))
    stored = log.take_events()
    tier.drop(tier.find(2))
    after_one = tier.find(1), log.take_events()
    tier.drop(tier.find(3))

    assert [[each.block_hash for each in event.blocks] for event in stored] == [[1, 2], [3]]
    assert after_one[0] is not None
    assert [event.block_hashes for event in after_one[1]] == [(2,)]
    assert [sorted(event.block_hashes) for event in log.take_events()] == [[1, 3]]
    assert (tier.find(1), tier.num_used) == (None, 0)


def test_restored_blocks_are_found_and_published():
    log = pools.EventLog()
    tier = tiers.Tier(kv_events.DISK, 4, log)
    tier.restore({2: (block(1),), 0: (block(2, parent=1),)})
    (event,) = log.take_events()

    assert (tier.find(1).slot, tier.find(2).slot) == (2, 0)
    assert [each.block_hash for each in event.blocks] == [1, 2]
    assert event.tier == kv_events.DISK


def test_evictions_count_those_that_no_request_has_read():
    tier = make_tier(2)
    store(tier, 1, 2)
    tier.release(tier.acquire(tier.find(1)))
    store(tier, 3, 4)

    assert (tier.num_evicted, tier.num_evicted_unread) == (2, 1)


def test_block_with_a_time_to_live_is_evicted_after_the_others_until_that_ends():
    tier = make_tier(4)
    store(tier, 1, 2, 3, 4)
    tier.keep(1, generate.CacheHint(ttl_s=300))
    tier.now = 1.0
    tier.touch([2, 3, 4])
    tier.now = 299.0
    store(tier, 5, 6)
    before = held(tier, 1, 2, 3, 4)
    tier.now = 301.0
    store(tier, 7)

    assert before == [1, 4]
    assert held(tier, 1, 4, 5, 6, 7) == [4, 5, 6, 7]


def test_use_begins_the_time_to_live_anew():
    tier = make_tier(2)
    store(tier, 1)
    tier.keep(1, generate.CacheHint(ttl_s=300))
    tier.now = 200.0
    tier.touch([1])
    tier.now = 400.0
    store(tier, 2, 3)

    assert held(tier, 1, 2, 3) == [1, 3]


def test_pinned_block_is_not_evicted_even_for_a_higher_priority():
    tier = make_tier(2)
    store(tier, 1)
    tier.keep(1, generate.CacheHint(ttl_s=300, is_pinned=True))
    in_use = tier.reserve((block(2),), 0)
    refused = tier.reserve((block(3),), 9)
    tier.now = 301.0

    assert refused is None
    assert tier.reserve((block(3),), 9) is not None
    assert held(tier, 1) == []
    tier.release(in_use)


def test_at_most_half_of_the_slots_have_a_time_to_live():
    tier, hint = make_tier(4), generate.CacheHint(ttl_s=300, is_pinned=True)
    store(tier, 1, 2, 3, 4)
    for name in (1, 2, 3):
        tier.keep(name, hint)
    refused, tier.now = tier.num_hints_refused, 301.0
    tier.keep(3, hint)  # those of 1 and 2 have ended

    assert refused == 1
    assert (tier.num_kept, tier.num_hints_refused) == (1, 1)
    store(tier, 5, 6, 7)
    assert held(tier, 1, 2, 3, 4) == [3]


def test_blocks_of_an_earlier_run_count_as_used_before_their_memory_is_provided():
    tier = make_tier(4, num_usable=0)
    tier.restore({1: (block(1),), 2: (block(2),)})
    counts = [tier.num_used]
    tier.drop(tier.find(1))
    counts.append(tier.num_used)
    tier.add_slots(4)

    assert [*counts, tier.num_used] == [2, 1, 1]


def test_queue_gives_the_highest_priority_first_and_then_the_oldest():
    queue = tiers.OffloadQueue()
    for name, priority in ((1, 0), (2, 5), (3, 0), (4, 5)):
        queue.add(tiers.QueuedBlock(block(name), priority))

    assert [queue.pop()[0].sequence_hash for _ in range(4)] == [2, 4, 1, 3]
    assert queue.pop() is None


def test_hint_of_a_later_offer_reaches_a_block_that_waits():
    queue = tiers.OffloadQueue()
    hints = (
        None,
        generate.CacheHint(ttl_s=300),
        generate.CacheHint(is_memory_only=True),
        generate.CacheHint(ttl_s=60, is_pinned=True),
        None,
    )
    for hint in hints:
        assert queue.add(tiers.QueuedBlock(block(1), 0, hint))

    assert queue.pop().hint == generate.CacheHint(ttl_s=300, is_pinned=True, is_memory_only=True)
    assert queue.pop() is None


def test_full_queue_refuses_blocks():
    queue = tiers.OffloadQueue()
    for name in range(tiers.MAX_QUEUED):
        queue.add(tiers.QueuedBlock(block(name), 0))

    assert not queue.add(tiers.QueuedBlock(block(-1), 0))
    assert len(queue) == tiers.MAX_QUEUED


def test_block_that_two_others_have_is_found_until_the_last_of_them_removes_it():
    log = pools.EventLog()
    tier = tiers.Tier(kv_events.HOST, 2, log)
    tier.apply_changes(tiers.SharedChanges({10: block(1), 20: block(1)}, [], is_cleared=False))
    tier.apply_changes(tiers.SharedChanges({}, [10], is_cleared=False))
    found, events = tier.find(1), log.take_events()
    tier.apply_changes(tiers.SharedChanges({}, [20], is_cleared=False))

    assert (found.slot, [type(each) for each in events]) == (20, [kv_events.Stored])
    assert tier.find(1) is None
    assert [event.block_hashes for event in log.take_events()] == [(1,)]


def test_block_whose_bytes_are_wrong_at_one_other_is_read_from_the_next():
    tier = make_tier()
    tier.apply_changes(tiers.SharedChanges({10: block(1), 20: block(1)}, [], is_cleared=False))
    tier.drop(tier.find(1))

    assert (tier.find(1).slot, tier.num_foreign) == (20, 1)


def test_clearing_forgets_the_blocks_of_all_others():
    tier = make_tier()
    tier.apply_changes(tiers.SharedChanges({10: block(1), 20: block(1)}, [], is_cleared=False))
    tier.apply_changes(tiers.SharedChanges({30: block(2)}, [], is_cleared=True))

    assert held(tier, 1, 2) == [2]
