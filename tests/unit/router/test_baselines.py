"""The policies that do not look at caches, and the policy for prefilled prompts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.test_selection import fill, selector
from tests.unit.router.views import chosen, prompt, view

from dynamo.base import errors
from dynamo.router import baselines
from dynamo.router.api import Worker


def test_round_robin_selects_workers_in_turn():
    policy = baselines.RoundRobin()

    assert [chosen(policy, prompt(), view({}, {}, {})) for _ in range(4)] == [0, 1, 2, 0]


def test_random_selects_every_worker():
    policy = baselines.Random(random.Random(1).random)

    assert {chosen(policy, prompt(), view({}, {}, {})) for _ in range(50)} == {0, 1, 2}


def test_least_loaded_counts_tokens_and_then_requests():
    policy = baselines.LeastLoaded()

    assert chosen(policy, prompt(), view({"queued": [50]}, {"queued": [20, 20]})) == 1
    assert chosen(policy, prompt(), view({"num_requests": 2}, {"num_requests": 1})) == 1


def test_power_of_two_never_selects_the_most_loaded_of_three():
    policy = baselines.PowerOfTwo(random.Random(1).random)
    seen = view({}, {"queued": [9]}, {"queued": [99]})

    assert {chosen(policy, prompt(), seen) for _ in range(60)} == {0, 1}


def test_power_of_two_selects_the_only_worker():
    assert chosen(baselines.PowerOfTwo(random.Random(1).random), prompt(), view({})) == 0


def test_consistent_hash_keeps_equal_beginnings_on_one_worker():
    policy, seen = baselines.ConsistentHash(), view(*({} for _ in range(8)))
    short, long = prompt(128, first=1), prompt(200, first=1)

    assert chosen(policy, short, seen) == chosen(policy, long, seen)
    assert len({chosen(policy, prompt(200, first=1000 * i), seen) for i in range(50)}) == 8


def test_consistent_hash_moves_only_prompts_of_a_removed_worker():
    policy, all_, fewer = baselines.ConsistentHash(), view({}, {}, {}, {}), view({}, {}, {})
    prompts = [prompt(first=1000 * i) for i in range(100)]

    moved = [p for p in prompts if chosen(policy, p, all_) != chosen(policy, p, fewer)]

    assert moved == [p for p in prompts if chosen(policy, p, all_) == 3]


def test_consistent_hash_accepts_a_prompt_without_a_full_block():
    assert chosen(baselines.ConsistentHash(), prompt(0), view({})) == 0


def test_direct_policy_refuses_a_request_without_a_worker():
    with pytest.raises(errors.InvalidRequest, match="name its worker"):
        chosen(baselines.Direct(), prompt(), view({}))


def test_decode_worker_has_fewest_blocks_in_use_or_to_compute():
    asked = prompt(is_prefilled=True)

    assert baselines.select_decode_worker(
        asked, view({"active_blocks": 5}, {"active_blocks": 4}), 0.0
    ) == (
        Worker(1),
        0.0,
    )
    # 32 tokens to compute are two blocks
    busy = view({"active_blocks": 5}, {"active_blocks": 4, "queued": (32,)})
    assert baselines.select_decode_worker(asked, busy, 0.0).worker == Worker(0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_decode_worker_has_fewest_requests_among_equals(numbers):
    seen = view(*({"num_requests": number} for number in numbers))

    chosen = baselines.select_decode_worker(prompt(is_prefilled=True), seen, 0.0).worker.instance_id
    assert numbers[chosen] == min(numbers)


def test_prefilled_prompt_goes_to_free_room_and_never_waits():
    made, index = selector(2)
    full = fill(made, 4)
    index.device = {Worker(0): 10}
    waits = made.select("waits", prompt(first=5000), 0.0)
    decisions = [made.select(f"p{i}", prompt(is_prefilled=True), 0.0) for i in range(4)]

    assert full[:2] != [None, None]
    assert waits is None
    assert sorted(one.worker.instance_id for one in decisions) == [0, 0, 1, 1]
    assert {one.overlap_blocks for one in decisions} == {0.0}


def test_prefilled_prompt_adds_no_prefill_and_no_speed_sample():
    made, _ = selector(1)
    made.select("a", prompt(is_prefilled=True), 0.0)
    load = made.active.loads[Worker(0)]
    before = load.prefill_tokens, load.active_blocks, load.num_requests
    made.mark_prefill_completed("a", 5.0)
    measured = made.active.prefill_speed.measured
    made.free("a", 6.0)

    assert before == (0, 10, 1)
    assert measured == 0.0
    assert (load.active_blocks, load.num_requests) == (0, 0)


def test_prefill_workers_do_not_count_blocks():
    made, _ = selector(1)
    made.active._counts_blocks = False
    made.select("a", prompt(), 0.0)
    load = made.active.loads[Worker(0)]

    assert (load.active_blocks, load.prefill_tokens) == (0, 160)
    assert made.active.prefix_lengths(prompt().sequence_hashes)
