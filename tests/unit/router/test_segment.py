"""A segment equals a set of positions for each holder."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import blocks
from dynamo.router import prefix_tree

HOLDERS = (1, 2, 4)
NUM_BLOCKS = 6
NAMES = blocks.sequence_hashes(range(1, NUM_BLOCKS + 1))
HOLDER, POSITION = st.sampled_from(HOLDERS), st.integers(0, NUM_BLOCKS - 1)
STEP = st.one_of(
    st.tuples(st.just("hold"), HOLDER, POSITION, st.integers(1, NUM_BLOCKS)),
    st.tuples(st.just("drop"), HOLDER, POSITION, st.integers(1, NUM_BLOCKS)),
    st.tuples(st.just("forget"), HOLDER),
)


def after(steps):
    """The segment, and who holds which positions, as sets."""
    made, held = prefix_tree.PrefixEdge(NAMES, 1), {1: set(range(NUM_BLOCKS)), 2: set(), 4: set()}
    for step in steps:
        match step:
            case "hold", holder, position, length:
                length = min(length, NUM_BLOCKS - position)
                made.add_blocks(holder, position, length)
                held[holder] |= set(range(position, position + length))
            case "drop", holder, position, length:
                gone = set(range(position, min(position + length, NUM_BLOCKS)))
                made.remove_blocks(holder, sum(1 << i for i in gone))
                held[holder] -= gone
            case "forget", holder:
                made.remove_workers(holder)
                held[holder].clear()
    return made, held


def held_by(made, holder):
    return [name for run in made.runs_of(holder) for name in run]


def named(positions):
    return [NAMES[i] for i in sorted(positions)]


@given(st.lists(STEP, max_size=8))
def test_everybody_holds_what_was_said(steps):
    made, held = after(steps)

    assert {h: held_by(made, h) for h in HOLDERS} == {h: named(held[h]) for h in HOLDERS}
    assert made.num_workers == sum(map(bool, held.values()))
    assert all(not holder & made.full for holder in made.partial)


@given(st.lists(STEP, max_size=8), st.integers(1, NUM_BLOCKS - 1))
def test_both_sides_of_a_cut_keep_their_holders(steps, at):
    made, held = after(steps)
    rest = made.split(at)

    assert (list(made.names), list(rest.names)) == (NAMES[:at], NAMES[at:])
    for holder in HOLDERS:
        assert held_by(made, holder) + held_by(rest, holder) == named(held[holder])
    assert all(positions < (1 << at) - 1 for positions in made.partial.values())


@given(st.lists(STEP, max_size=8))
def test_only_the_end_that_nobody_holds_is_trimmed(steps):
    made, held = after(steps)
    gone = list(made.trim())
    last = max((position for positions in held.values() for position in positions), default=-1)

    assert gone == NAMES[last + 1 :]
    assert list(made.names) == NAMES[: last + 1]
    assert {h: held_by(made, h) for h in HOLDERS} == {h: named(held[h]) for h in HOLDERS}


@given(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(0, 8))
def test_a_match_goes_as_far_as_the_chains_agree(other, position):
    own = [1, 2, 1, 1, 2, 2, 1, 1, 1]
    made, names = (
        prefix_tree.PrefixEdge(blocks.sequence_hashes(own), 1),
        blocks.sequence_hashes(other),
    )
    shared = 0
    while shared < len(other) and own[shared] == other[shared]:
        shared += 1
    if position < shared:
        assert made.match_length(position, names, position) == shared - position
