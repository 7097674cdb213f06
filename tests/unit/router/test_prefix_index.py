"""The index equals a naive dictionary of sets, after any history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.protocols import blocks, kv_events
from dynamo.router import api, prefix_index, prefix_tree

ALICE, BOB, BOB_1 = api.Worker(1), api.Worker(2), api.Worker(2, dp_rank=1)
FOREIGN = (api.Worker(3), api.Worker(4))  # their engines have names of their own
WORKERS = (ALICE, BOB, BOB_1, *FOREIGN)
DEVICE, HOST, DISK, REMOTE = kv_events.TIERS
PEER = kv_events.Tier("peer")  # a tier that no module knows
TIERS = (*kv_events.TIERS, PEER)  # fastest first


@pytest.fixture(autouse=True, params=[1, 3, 128], scope="module")
def segment_length(request):
    """Short segments meet every border; long ones are what is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MAX_EDGE_BLOCKS", request.param)
        yield


def engine_name(worker, name):
    """Never equal to a name of ours, which 64 bits are not by chance."""
    return name ^ worker.instance_id << 56 if worker in FOREIGN else name


def stored(worker, local_hashes, *, skip=0, tier=DEVICE):
    """The event of a chain; without its first `skip` blocks, which were told of before."""
    names = [engine_name(worker, n) for n in blocks.sequence_hashes(local_hashes)]
    pairs = tuple(map(kv_events.StoredBlock, names, local_hashes))[skip:]
    return kv_events.Stored(parent_hash=names[skip - 1] if skip else None, blocks=pairs, tier=tier)


def removed(worker, names, *, tier=DEVICE):
    return kv_events.Removed(block_hashes=tuple(engine_name(worker, n) for n in names), tier=tier)


class Naive:
    """Sets of names by worker and tier."""

    def __init__(self):
        self.held = {(w, t): set() for w in WORKERS for t in TIERS}

    def stored(self, worker, local_hashes, skip, tier):
        names = blocks.sequence_hashes(local_hashes)
        known = set().union(*(self.held[worker, t] for t in TIERS))
        if worker in FOREIGN and skip and names[skip - 1] not in known:
            return  # its name cannot be known
        self.held[worker, tier] |= set(names[skip:])

    def clear(self, worker):
        for tier in TIERS:
            self.held[worker, tier].clear()

    def find_matches(self, names):
        matches = {}
        for worker in WORKERS:
            at = 0
            for tier in TIERS:
                begin = at
                while at < len(names) and names[at] in self.held[worker, tier]:
                    at += 1
                if at > begin:
                    matches.setdefault(tier, {})[worker] = at - begin
        return api.OverlapScores(matches)


CHAIN = st.lists(st.integers(1, 3), min_size=1, max_size=7)
WORKER, TIER = st.sampled_from(WORKERS), st.sampled_from((DEVICE, DEVICE, *TIERS))
STEP = st.one_of(
    st.tuples(st.just("stored"), WORKER, CHAIN, st.sampled_from((0, 0, 0, 1, 3)), TIER),
    st.tuples(st.just("removed"), WORKER, CHAIN, st.integers(0, 6), TIER),
    st.tuples(st.just("cleared"), WORKER),
    st.tuples(st.just("left"), WORKER),
    st.tuples(st.just("sweep"), st.integers(0, 3)),
)


def perform(step, index, naive):
    match step:
        case "stored", worker, chain, skip, tier if skip < len(chain):
            index.apply(worker, stored(worker, chain, skip=skip, tier=tier))
            naive.stored(worker, chain, skip, tier)
        case "removed", worker, chain, first, tier:
            names = blocks.sequence_hashes(chain)[first : first + 3][::-1]
            index.apply(worker, removed(worker, names, tier=tier))
            naive.held[worker, tier] -= set(names)
        case "cleared", worker:
            index.apply(worker, kv_events.Cleared())
            naive.clear(worker)
        case "left", worker:
            index.remove_worker(worker)
            naive.clear(worker)
        case "sweep", num_segments:
            index.sweep(num_segments)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=30), st.lists(CHAIN, min_size=1, max_size=5))
def test_index_equals_sets_of_blocks_after_any_history(steps, prompts):
    index, naive = prefix_index.PrefixIndex(), Naive()
    for step in steps:
        perform(step, index, naive)

    for prompt in prompts:
        names = blocks.sequence_hashes(prompt)
        assert index.find_matches(names) == naive.find_matches(names)

    held = {key: set() for key in naive.held}
    for worker, tier, names in index.cached_runs():
        held[worker, tier] |= set(names)
    assert held == naive.held


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=20))
def test_blocks_of_removed_workers_are_freed(steps):
    index, naive = prefix_index.PrefixIndex(), Naive()
    for step in steps:
        perform(step, index, naive)
    for worker in WORKERS:
        index.remove_worker(worker)
    while not index.sweep(2):
        pass

    assert index.num_blocks == 0
    assert list(index.cached_runs()) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=30), CHAIN)
def test_bounded_index_reports_only_published_blocks(steps, prompt):
    index, naive = prefix_index.PrefixIndex(max_blocks=5), Naive()
    for step in steps:
        perform(step, index, naive)
    names = blocks.sequence_hashes(prompt)
    found, told = index.find_matches(names), naive.find_matches(names)

    assert index.num_blocks <= 5
    assert all(
        depth <= told.by_tier[DEVICE][worker]
        for worker, depth in found.by_tier.get(DEVICE, {}).items()
    )


def test_dynamos_example_is_matched():
    index = prefix_index.PrefixIndex()
    index.apply(ALICE, stored(ALICE, [1, 2, 3]))
    index.apply(BOB, stored(BOB, [1, 4, 5]))

    assert index.find_matches(blocks.sequence_hashes([1, 2, 3])).by_tier[DEVICE] == {
        ALICE: 3,
        BOB: 1,
    }


def test_block_removed_from_the_middle_ends_the_match():
    index, names = prefix_index.PrefixIndex(), blocks.sequence_hashes([1, 2, 3])
    for worker in (ALICE, BOB):
        index.apply(worker, stored(worker, [1, 2, 3]))
    index.apply(ALICE, removed(ALICE, names[1:2]))
    broken = index.find_matches(names)
    index.apply(ALICE, stored(ALICE, [1, 2], skip=1))

    assert broken.by_tier[DEVICE] == {ALICE: 1, BOB: 3}
    assert index.find_matches(names).by_tier[DEVICE] == {ALICE: 3, BOB: 3}


def test_slower_tier_counts_from_the_end_of_the_faster_one():
    index = prefix_index.PrefixIndex()
    index.apply(ALICE, stored(ALICE, [1, 2]))
    index.apply(ALICE, stored(ALICE, [1, 2, 3], tier=HOST))
    index.apply(ALICE, stored(ALICE, [1, 2, 3, 4, 5], skip=3, tier=DISK))

    assert index.find_matches(blocks.sequence_hashes([1, 2, 3, 4, 5, 6])) == api.OverlapScores(
        {DEVICE: {ALICE: 2}, HOST: {ALICE: 1}, DISK: {ALICE: 2}}
    )


def test_unknown_tiers_are_indexed_as_slower_than_the_usual_ones():
    index = prefix_index.PrefixIndex()
    index.apply(ALICE, stored(ALICE, [1, 2, 3], tier=PEER))
    index.apply(ALICE, stored(ALICE, [1], tier=REMOTE))
    names = blocks.sequence_hashes([1, 2, 3])

    assert list(index.find_matches(names).by_tier.items()) == [
        (REMOTE, {ALICE: 1}),
        (PEER, {ALICE: 2}),
    ]
    index.remove_worker(ALICE)
    assert index.find_matches(names) == api.OverlapScores({})


def test_removed_worker_is_not_matched_before_the_sweep():
    index, names = prefix_index.PrefixIndex(), blocks.sequence_hashes([1, 2, 3])
    for worker in (ALICE, BOB):
        index.apply(worker, stored(worker, [1, 2, 3]))
    index.remove_worker(ALICE)
    found = index.find_matches(names)
    index.apply(ALICE, stored(ALICE, [1]))

    assert found.by_tier[DEVICE] == {BOB: 3}
    assert index.find_matches(names).by_tier[DEVICE] == {ALICE: 1, BOB: 3}


def test_engine_block_with_unknown_parent_is_left_out():
    index, stranger = prefix_index.PrefixIndex(), FOREIGN[0]
    index.apply(stranger, stored(stranger, [1, 2, 3], skip=1))

    assert index.num_blocks == 0


def test_shared_blocks_outlive_private_ones_when_the_index_is_full():
    index, system_prompt = prefix_index.PrefixIndex(max_blocks=4), [9, 9]
    for worker in (ALICE, BOB):
        index.apply(worker, stored(worker, system_prompt))
    for private in ([1, 1], [2, 2], [3, 3]):
        index.apply(ALICE, stored(ALICE, private))

    assert index.find_matches(blocks.sequence_hashes(system_prompt)).by_tier[DEVICE] == {
        ALICE: 2,
        BOB: 2,
    }
    assert index.find_matches(blocks.sequence_hashes([3, 3])).by_tier[DEVICE] == {ALICE: 2}
    assert index.find_matches(blocks.sequence_hashes([1, 1])).by_tier == {}


def test_hash_of_more_than_64_bits_is_a_remote_error():
    index = prefix_index.PrefixIndex()
    event = kv_events.Stored(parent_hash=None, blocks=(kv_events.StoredBlock(2**64, 2**64),))

    with pytest.raises(errors.RemoteProtocolError, match="64 bits"):
        index.apply(ALICE, event)


def test_worker_bits_are_reused_after_the_sweep():
    index = prefix_index.PrefixIndex()
    for _ in range(100):
        index.apply(ALICE, stored(ALICE, [1, 2, 3]))
        index.apply(ALICE, kv_events.Cleared())

    assert index._worker_bits.live[DEVICE].bit_length() <= 3


def test_order_of_unknown_tiers_is_the_same_for_all_routers():
    attic, zoo = kv_events.Tier("attic"), kv_events.Tier("zoo")
    first, second = prefix_index.PrefixIndex(), prefix_index.PrefixIndex()
    for index, tiers in ((first, [attic, zoo]), (second, [zoo, attic])):
        for tier in tiers:
            index.apply(BOB, stored(BOB, [9], tier=tier))
        index.apply(ALICE, stored(ALICE, [1, 2], tier=attic))
        index.apply(ALICE, stored(ALICE, [1, 2, 3], tier=zoo))

    names = blocks.sequence_hashes([1, 2, 3])
    assert first.find_matches(names) == second.find_matches(names)
    assert first.find_matches(names).by_tier == {attic: {ALICE: 2}, zoo: {ALICE: 1}}
