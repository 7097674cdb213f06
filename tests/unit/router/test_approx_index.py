"""Guesses live as long as they should, and no more of them than allowed."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.protocols import blocks
from dynamo.router import api, prefix_index

ALICE, BOB = api.Worker(1), api.Worker(2)
TTL_S = 10


def make(policy="ttl", max_guesses=1000):
    return prefix_index.ApproxIndex(policy=policy, ttl_s=TTL_S, max_guesses=max_guesses)


def names(*local_hashes):
    return blocks.sequence_hashes(local_hashes)


class Naive:
    """When each guess ends."""

    def __init__(self):
        self.ends = {}

    def record(self, worker, chain, now):
        self.ends |= {(worker, name): math.ceil(now) + TTL_S for name in names(*chain)}

    def find_matches(self, chain, now):
        depths = {}
        for worker in (ALICE, BOB):
            for name in names(*chain):
                if self.ends.get((worker, name), 0) <= now:
                    break
                depths[worker] = depths.get(worker, 0) + 1
        return depths


CHAIN = st.lists(st.integers(1, 2), min_size=1, max_size=5)
WORKER = st.sampled_from((ALICE, BOB))
STEP = st.tuples(WORKER, CHAIN, st.floats(0, 6), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=20), CHAIN)
def test_guess_expires_its_ttl_after_the_last_use(steps, prompt):
    index, naive, now = make(), Naive(), 100.0
    for worker, chain, passed_s, has_left in steps:
        now += passed_s
        if has_left:
            index.remove_worker(worker)
            naive.ends = {key: end for key, end in naive.ends.items() if key[0] != worker}
        index.expire(now)
        index.record(worker, names(*chain), now)
        naive.record(worker, chain, now)
        now += passed_s
    index.expire(now)

    assert index.find_matches(names(*prompt)).by_tier.get("device", {}) == naive.find_matches(
        prompt, now
    )
    assert index.num_guesses == sum(end > now for end in naive.ends.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(WORKER, st.integers(1, 40)), min_size=1, max_size=40))
def test_oldest_guesses_are_pruned_when_the_index_is_full(steps):
    index, used_at = make("lru", max_guesses=20), {}
    for now, (worker, root) in enumerate(steps):
        index.record(worker, names(root, 1, 2), now)
        used_at[worker, root] = now
    found = {
        (worker, root): at
        for (worker, root), at in used_at.items()
        if index.find_matches(names(root, 1, 2)).by_tier.get("device", {}).get(worker) == 3
    }
    gone = {key: at for key, at in used_at.items() if key not in found}

    assert index.num_guesses <= 20
    assert max(used_at.values()) in found.values()
    assert all(at <= min(found.values()) for at in gone.values())


def test_number_of_guesses_pruned_at_once_is_bounded(monkeypatch):
    monkeypatch.setattr(prefix_index, "_MIN_PRUNED", 4)
    index = make("lru", max_guesses=100)
    sizes = []
    for root in range(120):
        index.record(ALICE, names(root), root)
        sizes.append(index.num_guesses)

    assert max(sizes) == 100
    assert min(sizes[100:]) == 80
    assert max(before - after for before, after in itertools.pairwise(sizes)) == 3


@pytest.mark.parametrize(("policy", "expected"), [("ttl", {}), ("lru", {ALICE: 2})])
def test_only_the_ttl_policy_expires_guesses(policy, expected):
    index = make(policy)
    index.record(ALICE, names(1, 2), 100.0)
    index.expire(1e6)

    assert index.find_matches(names(1, 2)).by_tier.get("device", {}) == expected


def test_prompt_without_a_full_block_is_not_recorded():
    index = make()
    index.record(ALICE, [], 100.0)

    assert index.num_guesses == 0
    assert index.find_matches([]).by_tier.get("device", {}) == {}


def test_what_expired_guesses_occupied_is_freed():
    index, now = make(), 100.0
    for root in range(100):
        index.record(ALICE, names(root, 1, 2), now)
        now += 2 * TTL_S
        index.expire(now)

    assert index._index.num_blocks <= 6
    assert len(index._index._worker_bits._workers) <= 3
