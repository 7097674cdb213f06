"""The block pool against a naive model, after any history: no block is lost, and events say which are registered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.kvbm import pool as pools
from dynamo.protocols import kv_events
from engine_suite import replay


def commit_chain(pool, blocks, names, parent=None):
    for block, name in zip(blocks, names, strict=True):
        pool.commit(block, sequence_hash=name, local_hash=name + 1000, parent_hash=parent)
        parent = name


def test_empty_blocks_are_allocated_before_registered_ones():
    pool = pools.BlockPool(4)
    first = pool.allocate(2)
    commit_chain(pool, first, [1, 2])
    pool.release(first)

    assert first == [0, 1]
    assert pool.allocate(2) == [2, 3]
    assert pool.match_prefix([1, 2]) == [0, 1]


def test_chain_loses_its_tail_before_its_head():
    pool = pools.BlockPool(3)
    blocks = pool.allocate(3)
    commit_chain(pool, blocks, [1, 2, 3])
    pool.release(blocks)
    pool.allocate(1)

    assert pool.match_prefix([1, 2, 3]) == blocks[:2]


def test_block_released_longest_ago_is_evicted_first():
    pool = pools.BlockPool(2)
    old, new = pool.allocate(2)
    commit_chain(pool, [old], [1])
    commit_chain(pool, [new], [2])
    pool.release([old])
    pool.release([new])
    pool.release(pool.match_prefix([1]))

    assert pool.allocate(1) == [new]


def test_allocating_more_blocks_than_are_free_acquires_none():
    pool = pools.BlockPool(2)

    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_first_of_two_blocks_with_equal_content_is_found():
    pool = pools.BlockPool(4)
    one, other = pool.allocate(1), pool.allocate(1)
    commit_chain(pool, one, [7])
    commit_chain(pool, other, [7])
    pool.release(other)

    assert pool.match_prefix([7]) == one
    assert pool.allocate(3) == [other[0], 2, 3]


def test_shared_block_is_free_when_its_last_user_releases_it():
    pool = pools.BlockPool(1)
    blocks = pool.allocate(1)
    commit_chain(pool, blocks, [1])
    pool.match_prefix([1])
    pool.release(blocks)

    assert pool.num_active == 1
    pool.release(blocks)
    assert pool.num_active == 0


def test_clear_deregisters_content_but_leaves_active_blocks_to_their_sequences():
    pool = pools.BlockPool(3)
    kept, dropped = pool.allocate(1), pool.allocate(1)
    commit_chain(pool, kept, [1])
    commit_chain(pool, dropped, [2])
    pool.release(dropped)
    pool.clear()

    assert pool.match_prefix([1]) == []
    assert pool.match_prefix([2]) == []
    assert pool.num_active == 1
    pool.release(kept)
    assert pool.num_free == 3


def test_block_whose_parent_cannot_be_found_stays_private():
    pool = pools.BlockPool(3)
    blocks = pool.allocate(2)
    commit_chain(pool, blocks[:1], [1])
    pool.clear()
    pool.take_events()
    commit_chain(pool, blocks[1:], [2], parent=1)

    assert pool.take_events() == []


def test_consecutive_blocks_become_one_event():
    pool = pools.BlockPool(3)
    blocks = pool.allocate(3)
    commit_chain(pool, blocks, [1, 2, 3])
    pool.release(blocks)
    pool.allocate(2)
    stored = tuple(kv_events.StoredBlock(name, name + 1000) for name in (1, 2, 3))

    assert pool.take_events() == [
        kv_events.Stored(parent_hash=None, blocks=stored),
        kv_events.Removed(block_hashes=(3, 2)),
    ]
    assert pool.take_events() == []


def test_event_of_a_continued_chain_names_its_parent():
    pool = pools.BlockPool(3)
    blocks = pool.allocate(2)
    commit_chain(pool, blocks[:1], [1])
    pool.take_events()
    commit_chain(pool, blocks[1:], [2], parent=1)

    assert pool.take_events() == [
        kv_events.Stored(parent_hash=1, blocks=(kv_events.StoredBlock(2, 1002),))
    ]


def test_second_release_of_a_block_is_an_error():
    pool = pools.BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)

    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 6))
def test_prefix_is_found_as_far_as_it_was_committed(tokens, num_blocks):
    pool = pools.BlockPool(num_blocks)
    names = [hash(tuple(tokens[: i + 1])) for i in range(len(tokens))]
    blocks = pool.allocate(min(len(names), num_blocks))
    commit_chain(pool, blocks, names[: len(blocks)])

    assert pool.match_prefix(names) == blocks


def test_registered_block_cannot_be_registered_with_other_content():
    pool = pools.BlockPool(1)
    blocks = pool.allocate(1)
    commit_chain(pool, blocks, [1])

    with pytest.raises(AssertionError, match="registered with other content"):
        commit_chain(pool, blocks, [2])


class PoolMachine(RuleBasedStateMachine):
    """Against a naive model: sequences over a tiny alphabet, so that prefixes collide all the time."""

    def __init__(self):
        super().__init__()
        self.pool = pools.BlockPool(7)
        self.sequences = []  # (names, blocks)
        self.findable = {}  # name -> block, in the naive model
        self.from_events = {}

    def sync(self):
        events = self.pool.take_events()
        self.from_events = replay(events, self.from_events)
        self.findable = {n: b for n, b in self.findable.items() if n in self.from_events}

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def start(self, text):
        names = [text[: i + 1] for i in range(len(text))]
        hashes = [sum(3**i * (ord(c) - 96) for i, c in enumerate(name)) for name in names]
        expected = []
        for name in hashes:
            if name not in self.findable:
                break
            expected.append(self.findable[name])
        matched = self.pool.match_prefix(hashes)
        assert matched == expected
        num_free = self.pool.num_free
        fresh = self.pool.allocate(len(hashes) - len(matched))
        assert (fresh is None) == (len(hashes) - len(matched) > num_free)
        if fresh is None:
            self.pool.release(matched)
            return
        used = {b for _, blocks in self.sequences for b in blocks} | set(matched)
        assert not used & set(fresh)
        self.sync()
        self.sequences.append((hashes, matched + fresh))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fill(self, data):
        names, blocks = data.draw(st.sampled_from(self.sequences))
        parent = None
        for name, block in zip(names, blocks, strict=True):
            self.pool.commit(block, sequence_hash=name, local_hash=name, parent_hash=parent)
            if name not in self.findable and (parent is None or parent in self.findable):
                self.findable[name] = block
            parent = name
        self.sync()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index)[1])

    @rule()
    def clear(self):
        self.pool.clear()
        self.findable = {}
        self.sync()

    @invariant()
    def no_block_is_lost(self):
        active = {b for _, blocks in self.sequences for b in blocks}

        assert self.pool.num_active == len(active)

    @invariant()
    def events_tell_what_the_pool_holds(self):
        assert self.from_events.keys() == self.findable.keys()


TestPoolMachine = PoolMachine.TestCase


def test_retained_blocks_stay_active_until_both_users_have_released_them():
    memory = pools.BlockPool(4)
    blocks = memory.allocate(2)
    memory.retain(blocks)
    memory.release(blocks)
    before = memory.num_active
    memory.release(blocks)

    assert (before, memory.num_active) == (2, 0)
