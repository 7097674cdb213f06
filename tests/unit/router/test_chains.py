"""The store under the index: it survives names that nobody should send, and keeps old before new."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.protocols import blocks
from dynamo.router import prefix_tree

NAMES = st.lists(st.integers(0, 5), min_size=1, max_size=6)
HOLDER = st.sampled_from((1, 2, 4))
STEP = st.one_of(
    st.tuples(st.just("add_blocks"), HOLDER, NAMES),
    st.tuples(st.just("remove_blocks"), HOLDER, NAMES),
    st.tuples(st.just("match"), NAMES, st.integers(0, 7)),
    st.tuples(st.just("begin_sweep"), HOLDER),
    st.tuples(st.just("sweep"), st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=30), st.integers(1, 8))
def test_names_that_are_no_chain_break_nothing(steps, max_blocks):
    store = prefix_tree.PrefixTree(max_blocks)
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    store.begin_sweep(7)
    while not store.sweep(1):
        pass

    assert len(store) == 0
    assert store.match([0, 1, 2], 7) == []


def test_a_chain_that_grows_by_single_blocks_fills_its_segment():
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
def test_when_room_ends_a_sequence_loses_its_tail_first(max_blocks):
    store, names = prefix_tree.PrefixTree(max_blocks), blocks.sequence_hashes(range(1, 351))
    store.add_blocks(1, names)
    runs = store.match(names, 1)

    assert runs == [(1, 350 if max_blocks == 1000 else 2 * prefix_tree.MAX_EDGE_BLOCKS)]
