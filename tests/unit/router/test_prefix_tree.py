"""The edges and the store of the prefix tree, against sets of blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.protocols import blocks
from dynamo.router import prefix_tree

WORKERS = (1, 2, 4)
NUM_BLOCKS = 6
NAMES = blocks.sequence_hashes(range(1, NUM_BLOCKS + 1))
WORKER, POSITION = st.sampled_from(WORKERS), st.integers(0, NUM_BLOCKS - 1)
STEP = st.one_of(
    st.tuples(st.just("hold"), WORKER, POSITION, st.integers(1, NUM_BLOCKS)),
    st.tuples(st.just("drop"), WORKER, POSITION, st.integers(1, NUM_BLOCKS)),
    st.tuples(st.just("forget"), WORKER),
)


def after(steps):
    """Return the edge after these steps, and the positions that each worker has, as sets."""
    edge, expected = (
        prefix_tree.PrefixEdge(NAMES, 1),
        {1: set(range(NUM_BLOCKS)), 2: set(), 4: set()},
    )
    for step in steps:
        match step:
            case "hold", worker, position, length:
                length = min(length, NUM_BLOCKS - position)
                edge.add_blocks(worker, position, length)
                expected[worker] |= set(range(position, position + length))
            case "drop", worker, position, length:
                removed = set(range(position, min(position + length, NUM_BLOCKS)))
                edge.remove_blocks(worker, sum(1 << i for i in removed))
                expected[worker] -= removed
            case "forget", worker:
                edge.remove_workers(worker)
                expected[worker].clear()
    return edge, expected


def names_of(edge, worker):
    return [name for run in edge.runs_of(worker) for name in run]


def named(positions):
    return [NAMES[i] for i in sorted(positions)]


@given(st.lists(STEP, max_size=8))
def test_edge_equals_sets_of_positions(steps):
    edge, expected = after(steps)

    assert {h: names_of(edge, h) for h in WORKERS} == {h: named(expected[h]) for h in WORKERS}
    assert edge.num_workers == sum(map(bool, expected.values()))
    assert all(not worker & edge.full for worker in edge.partial)


@given(st.lists(STEP, max_size=8), st.integers(1, NUM_BLOCKS - 1))
def test_split_keeps_the_workers_of_both_parts(steps, at):
    edge, expected = after(steps)
    tail = edge.split(at)

    assert (list(edge.names), list(tail.names)) == (NAMES[:at], NAMES[at:])
    for worker in WORKERS:
        assert names_of(edge, worker) + names_of(tail, worker) == named(expected[worker])
    assert all(positions < (1 << at) - 1 for positions in edge.partial.values())


@given(st.lists(STEP, max_size=8))
def test_trim_drops_only_unused_blocks_at_the_end(steps):
    edge, expected = after(steps)
    removed = list(edge.trim())
    last = max((position for positions in expected.values() for position in positions), default=-1)

    assert removed == NAMES[last + 1 :]
    assert list(edge.names) == NAMES[: last + 1]
    assert {h: names_of(edge, h) for h in WORKERS} == {h: named(expected[h]) for h in WORKERS}


@given(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(0, 8))
def test_match_length_ends_where_chains_differ(other, position):
    own = [1, 2, 1, 1, 2, 2, 1, 1, 1]
    edge, names = (
        prefix_tree.PrefixEdge(blocks.sequence_hashes(own), 1),
        blocks.sequence_hashes(other),
    )
    shared = 0
    while shared < len(other) and own[shared] == other[shared]:
        shared += 1
    if position < shared:
        assert edge.match_length(position, names, position) == shared - position


ANY_NAMES = st.lists(st.integers(0, 5), min_size=1, max_size=6)
TREE_STEP = st.one_of(
    st.tuples(st.just("add_blocks"), WORKER, ANY_NAMES),
    st.tuples(st.just("remove_blocks"), WORKER, ANY_NAMES),
    st.tuples(st.just("match"), ANY_NAMES, st.integers(0, 7)),
    st.tuples(st.just("begin_sweep"), WORKER),
    st.tuples(st.just("sweep"), st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(TREE_STEP, max_size=30), st.integers(1, 8))
def test_inconsistent_hash_chains_leave_an_empty_tree_after_a_sweep(steps, max_blocks):
    store = prefix_tree.PrefixTree(max_blocks)
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    store.begin_sweep(7)
    while not store.sweep(1):
        pass

    assert len(store) == 0
    assert store.match([0, 1, 2], 7) == []


def test_single_block_events_fill_an_edge():
    store, names = (
        prefix_tree.PrefixTree(1000),
        blocks.sequence_hashes(range(1, 2 * prefix_tree.MAX_EDGE_BLOCKS)),
    )
    for i, name in enumerate(names):
        store.add_blocks(1, [name], names[i - 1] if i else None)

    assert [len(run) for run in store.runs_of(1)] == [
        prefix_tree.MAX_EDGE_BLOCKS,
        prefix_tree.MAX_EDGE_BLOCKS - 1,
    ]


@pytest.mark.parametrize("max_blocks", [1000, 300])
def test_full_tree_drops_the_tail_of_a_sequence_first(max_blocks):
    store, names = prefix_tree.PrefixTree(max_blocks), blocks.sequence_hashes(range(1, 351))
    store.add_blocks(1, names)
    runs = store.match(names, 1)

    assert runs == [(1, 350 if max_blocks == 1000 else 2 * prefix_tree.MAX_EDGE_BLOCKS)]


def test_oldest_edges_of_a_full_tree_are_looked_for_several_at_a_time():
    """To find the first entry of a dictionary takes the longer, the more were removed before it."""

    class Edges(dict):
        num_looks = 0

        def __iter__(self):
            self.num_looks += 1
            return super().__iter__()

    max_blocks = 4 * 4096
    store = prefix_tree.PrefixTree(max_blocks)
    store._edges = Edges()
    for name in range(max_blocks + 1000):
        store.add_blocks(1, [name])

    assert max_blocks - 4 <= len(store) <= max_blocks
    assert store._edges.num_looks <= 200


def test_blocks_that_are_known_by_turns_are_not_copied_again_for_each():
    class Blocks(list):
        num_copied = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            if isinstance(place, slice):
                Blocks.num_copied += len(found)
            return found

    num_blocks = 60_000
    store = prefix_tree.PrefixTree(num_blocks)
    for name in range(0, num_blocks, 2):
        store.add_blocks(1, [name])
    store.add_blocks(2, Blocks(range(num_blocks)))

    assert len(store) == num_blocks
    assert Blocks.num_copied < num_blocks * 8192
