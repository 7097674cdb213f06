"""Eviction asks where a block goes: pools above tiers in memory, and events that say which tier holds a block."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kvbm import events, lifecycle, tiers
from dynamo.kvbm import pool as pools
from dynamo.protocols import kv_events

DEVICE, HOST, DISK = kv_events.TIERS[:3]


class Tiers:
    """A pool of `num_blocks`, a host tier and a disk tier; a block's content is its sequence hash."""

    def __init__(self, num_blocks=2, num_host=2, num_disk=2):
        self.memory = {}
        log = events.EventLog()
        self.disk = tiers.MemoryTier(
            DISK, num_disk, log, read_above=lambda i: self.host.read_block(i)
        )
        self.host = tiers.MemoryTier(
            HOST, num_host, log, read_above=self.memory.__getitem__, below=self.disk
        )
        self.pool = pools.BlockPool(num_blocks, eviction=self.host, events=log)
        self.held = {DEVICE: set(), HOST: set(), DISK: set()}

    def compute(self, name):
        """Fill a block, and release it."""
        (block,) = self.pool.allocate(1)
        self.memory[block] = content(name)
        self.pool.commit(block, sequence_hash=name, local_hash=name, parent_hash=None)
        self.pool.release([block])
        self.apply_events()

    def apply_events(self):
        for event in self.pool.take_events():
            match event:
                case kv_events.Stored(blocks=blocks, tier=tier):
                    self.held[tier] |= {block.block_hash for block in blocks}
                case kv_events.Removed(block_hashes=names, tier=tier):
                    self.held[tier] -= set(names)

    def lookup(self, name):
        """The content, from the tier in which it is."""
        if blocks := self.pool.match_prefix([name]):
            self.pool.release(blocks)
            return self.memory[blocks[0]]
        return self.host.read_content(name) or self.disk.read_content(name)


def content(name):
    return name.to_bytes(8, "little")


def test_evicted_block_moves_down_tier_by_tier():
    rig = Tiers()
    for name in range(1, 6):
        rig.compute(name)

    assert rig.held == {DEVICE: {4, 5}, HOST: {2, 3}, DISK: {1}}
    assert rig.pool.num_evicted_to == {HOST: 3}
    assert [rig.lookup(name) for name in range(1, 6)] == [content(name) for name in range(1, 6)]


def test_block_is_stored_below_before_it_is_removed_above():
    rig = Tiers(num_blocks=1)
    rig.compute(1)
    rig.pool.allocate(1)
    stored, removed = rig.pool.take_events()

    assert (stored.tier, removed.tier) == (HOST, DEVICE)
    assert stored.blocks == (kv_events.StoredBlock(1, 1),)
    assert removed.block_hashes == (1,)


def test_block_that_the_tier_below_has_already_is_not_copied_again():
    rig = Tiers(num_blocks=1)
    rig.compute(1)
    rig.compute(2)
    rig.compute(1)
    rig.compute(3)

    assert rig.held[HOST] == {1, 2}
    assert rig.held[DISK] == set()


def test_block_of_a_tier_without_memory_is_dropped():
    rig = Tiers(num_blocks=1, num_host=0)
    rig.compute(1)
    rig.compute(2)

    assert rig.lookup(1) is None
    assert rig.held == {DEVICE: {2}, HOST: set(), DISK: set()}
    assert rig.pool.num_evicted_to == {None: 1}


def test_prefix_is_counted_up_to_the_first_block_that_is_missing():
    rig = Tiers(num_blocks=1)
    for name in (1, 2, 3):
        rig.compute(name)

    assert rig.host.count_prefix([1, 2, 3]) == 2


def test_policy_is_asked_with_the_content_that_is_evicted():
    placed = []

    class Policy:
        def place_evicted(self, block_id, block):
            placed.append((block_id, block))

    pool = pools.BlockPool(1, eviction=Policy())
    (block,) = pool.allocate(1)
    pool.commit(block, sequence_hash=7, local_hash=8, parent_hash=None)
    pool.release([block])
    pool.allocate(1)

    assert placed == [(block, lifecycle.RegisteredBlock(7, 8, None))]


@given(st.lists(st.integers(1, 9), max_size=40))
def test_events_say_which_tier_holds_a_block_after_any_history(names):
    rig = Tiers()
    for name in names:
        rig.compute(name)

    for name in set(names):
        held_by = {tier for tier, held in rig.held.items() if name in held}
        assert (HOST in held_by) == (rig.host.count_prefix([name]) == 1)
        assert (DISK in held_by) == (rig.disk.count_prefix([name]) == 1)
        assert rig.lookup(name) == (content(name) if held_by else None)
