"""The routing policies: the default, Dynamo's cost functions, and those that do not look at caches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.test_selection import fill, selector
from tests.unit.router.views import chosen, prompt, view

from dynamo.base import errors
from dynamo.router import api, policies
from dynamo.router.api import Worker
from dynamo.router.worker_load import DecodeSlowdown

W1, W2, W3 = Worker(1), Worker(2), Worker(3)


def test_logits_equal_those_of_dynamos_documents():
    blocks = {"W1": (8, 10), "W2": (5, 5), "W3": (2, 9)}

    logits = {name: policies.Dynamo(draw=random.random).cost(*b) for name, b in blocks.items()}

    assert logits == {"W1": 18, "W2": 10, "W3": 11}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.1635, 0.4444, 0.3922]), (0.1, [0.0, 0.777, 0.223])],
)
def test_probabilities_equal_those_of_dynamos_documents(temperature, expected):
    found = policies.probabilities([18, 10, 11], temperature)

    assert found == pytest.approx(expected, abs=5e-4)
    assert sum(found) == pytest.approx(1)


def test_equal_costs_are_equally_likely():
    assert policies.probabilities([7, 7], 0.5) == [0.5, 0.5]


def test_temperature_zero_picks_a_lowest_cost():
    rng = random.Random(1)

    assert policies.pick([3, 1, 2], 0, rng.random) == 1
    assert {policies.pick([1, 2, 1], 0, rng.random) for _ in range(50)} == {0, 2}


def test_draws_follow_the_probabilities():
    rng = random.Random(1)

    picks = [policies.pick([18, 10, 11], 1.0, rng.random) for _ in range(4000)]

    assert [picks.count(i) / 4000 for i in range(3)] == pytest.approx([0.16, 0.44, 0.39], abs=0.03)


def test_a_draw_just_below_one_picks_the_last():
    assert policies.pick([1, 2], 1.0, lambda: 1 - 1e-17) == 1


def test_cost_has_queued_and_new_tokens_and_the_blocks_in_use():
    seen = view({"queued": [32], "active_blocks": 10}, cached={0: 2})

    parts = policies.Dynamo(draw=random.random).cost_parts(prompt(10), seen, Worker(0))

    assert parts == {"prefill": (32 + 160 - 32) / 16, "decode": 10 + 10}


def test_blocks_of_slower_tiers_count_by_weight():
    overlaps = api.OverlapScores({"device": {W1: 2}, "host": {W1: 4, W2: 1}, "disk": {W3: 4}})

    assert policies.cached_blocks(overlaps, policies.DEFAULT_TIER_WEIGHTS) == {
        W1: 5.0,
        W2: 0.75,
        W3: 1.0,
    }


def test_device_weight_below_one_scales_device_blocks():
    overlaps = api.OverlapScores({"device": {W1: 2}})

    assert policies.cached_blocks(overlaps, {"device": 0.5}) == {W1: 1.0}


def test_lmetric_is_a_product():
    assert policies.LMetric(draw=random.random).cost(3, 4) == 15


def test_a_tier_without_a_weight_counts_like_the_lowest_one():
    overlaps = api.OverlapScores({"device": {W1: 1}, "peer": {W1: 4}})

    assert policies.cached_blocks(overlaps) == {W1: 2.0}


def draw():
    return 0.0


def documented():
    """Three workers with 8, 5 and 2 blocks to compute and 10, 5 and 9 in use, as the documents have them.

    The prompt has ten blocks, of which 2, 5 and 8 are cached; they are in use by others, so none is new.
    """
    return view(
        {"active_blocks": 10},
        {"active_blocks": 5},
        {"active_blocks": 9},
        cached={0: 2, 1: 5, 2: 8},
        in_flight={0: 10, 1: 10, 2: 10},
    )


def test_dynamos_documented_example_selects_the_second_worker():
    decision = policies.Dynamo(draw=draw).select_worker(prompt(), documented(), 0.0)

    assert (decision.worker.instance_id, decision.overlap_blocks) == (1, 5)


def test_larger_overlap_weight_prefers_cached_blocks():
    assert chosen(policies.Dynamo(draw=draw, overlap_weight=2.0), prompt(), documented()) == 2


def test_blocks_of_requests_in_flight_are_not_new():
    seen = view({"active_blocks": 5}, {"active_blocks": 5}, in_flight={1: 3})

    assert chosen(policies.Dynamo(draw=draw), prompt(), seen) == 1


def test_queued_prefill_raises_the_cost():
    assert chosen(policies.Dynamo(draw=draw), prompt(), view({"queued": [16]}, {})) == 1


def test_lmetric_selects_the_lowest_product():
    seen = view({"active_blocks": 0}, {"active_blocks": 30}, cached={1: 9}, in_flight={1: 9})

    assert chosen(policies.LMetric(draw=draw), prompt(), seen) == 1


POLICY = policies.EstimatedTtft()


def test_prompt_goes_to_the_worker_with_its_prefix():
    assert chosen(POLICY, prompt(100), view({}, {}, cached={1: 100})) == 1


def test_prompt_follows_a_request_in_flight_with_its_prefix():
    seen = view({}, {"queued": [1600]}, in_flight={1: 100})

    assert chosen(POLICY, prompt(200), seen) == 1


def test_a_long_queue_is_worth_a_second_copy():
    queues = [0, 1_000, 10_000, 100_000]

    choices = [
        chosen(POLICY, prompt(100), view({}, {"queued": [q]}, cached={1: 90})) for q in queues
    ]

    assert choices == [1, 1, 0, 0]


def test_prompt_accepts_a_longer_queue_when_all_workers_are_busy():
    def seen(num_requests):
        return view({"num_requests": num_requests}, {"queued": [6_500]}, cached={1: 90})

    assert chosen(POLICY, prompt(100), seen(0)) == 0
    assert chosen(POLICY, prompt(100), seen(1)) == 1


def test_few_idle_workers_among_many_are_enough_to_leave_the_prefix():
    def choice(num_busy, num_idle):
        busy = [{"num_requests": 1} for _ in range(num_busy)]
        idle = [{} for _ in range(num_idle)]
        home = {"queued": [6_500]}
        return chosen(POLICY, prompt(100), view(home, *busy, *idle, cached={0: 90}))

    assert choice(5, 2) == 0  # a quarter is idle, and the home is waited for
    assert choice(599, 200) != 0  # a quarter is idle, and that is plenty


def test_new_prompt_goes_to_the_cache_with_least_insertions():
    assert (
        chosen(POLICY, prompt(), view({"inserted_tokens": 900.0}, {"inserted_tokens": 100.0})) == 1
    )


def test_idle_worker_is_preferred_to_a_decoding_one():
    assert chosen(POLICY, prompt(), view({"num_requests": 1}, {})) == 1


def test_popular_prefix_spreads_over_workers():
    def choice(num_at_home):
        crowd = {"num_requests": num_at_home}
        return chosen(
            POLICY, prompt(128), view(crowd, *({"num_requests": 1},) * 3, cached={0: 126})
        )

    assert [choice(n) for n in (1, 8, 60)] == [0, 0, 1]


def slowed(seconds_per_token):
    """The loads of two workers, the first of which writes an answer; answers were seen to slow each other by this."""
    seen = view({"num_requests": 1, "active_blocks": 100}, {}, cached={0: 100})
    for load in seen.loads.values():
        load.decode_slowdown = slowdown = DecodeSlowdown()
        load.prefill_speed.observe(1_000, 0.1)
        for tokens in range(1_000, 20_000, 1_000):
            slowdown.observe(1 + seconds_per_token * tokens, tokens)
    return seen


def test_answers_do_not_share_a_worker_while_another_idles_if_that_slows_them():
    assert chosen(POLICY, prompt(100), slowed(0.0)) == 0
    assert chosen(POLICY, prompt(100), slowed(1e-3)) == 1


def test_new_tokens_cost_more_where_they_stop_more_answers():
    seen = view({"num_requests": 3}, {"num_requests": 2})

    parts = POLICY.cost_parts(prompt(100), seen, 0.0)

    assert [part["answers standing still"] for part in parts.values()] == [3 * 1_600, 2 * 1_600]


def test_queued_requests_count_at_the_worker_they_wait_for():
    assert chosen(POLICY, prompt(), view({"reserved_tokens": 100.0}, {})) == 1


def test_decision_carries_the_expected_overlap():
    decision = POLICY.select_worker(
        prompt(100), view({}, {}, cached={1: 50}, in_flight={1: 60}), 0.0
    )

    assert decision.overlap_blocks == 60


def test_round_robin_selects_workers_in_turn():
    policy = policies.RoundRobin()

    assert [chosen(policy, prompt(), view({}, {}, {})) for _ in range(4)] == [0, 1, 2, 0]


def test_random_selects_every_worker():
    policy = policies.Random(random.Random(1).random)

    assert {chosen(policy, prompt(), view({}, {}, {})) for _ in range(50)} == {0, 1, 2}


def test_least_loaded_counts_tokens_and_then_requests():
    policy = policies.LeastLoaded()

    assert chosen(policy, prompt(), view({"queued": [50]}, {"queued": [20, 20]})) == 1
    assert chosen(policy, prompt(), view({"num_requests": 2}, {"num_requests": 1})) == 1


def test_power_of_two_never_selects_the_most_loaded_of_three():
    policy = policies.PowerOfTwo(random.Random(1).random)
    seen = view({}, {"queued": [9]}, {"queued": [99]})

    assert {chosen(policy, prompt(), seen) for _ in range(60)} == {0, 1}


def test_power_of_two_selects_the_only_worker():
    assert chosen(policies.PowerOfTwo(random.Random(1).random), prompt(), view({})) == 0


def test_consistent_hash_keeps_equal_beginnings_on_one_worker():
    policy, seen = policies.ConsistentHash(), view(*({} for _ in range(8)))
    short, long = prompt(128, first=1), prompt(200, first=1)

    assert chosen(policy, short, seen) == chosen(policy, long, seen)
    assert len({chosen(policy, prompt(200, first=1000 * i), seen) for i in range(50)}) == 8


def test_consistent_hash_moves_only_prompts_of_a_removed_worker():
    policy, all_, fewer = policies.ConsistentHash(), view({}, {}, {}, {}), view({}, {}, {})
    prompts = [prompt(first=1000 * i) for i in range(100)]

    moved = [p for p in prompts if chosen(policy, p, all_) != chosen(policy, p, fewer)]

    assert moved == [p for p in prompts if chosen(policy, p, all_) == 3]


def test_consistent_hash_accepts_a_prompt_without_a_full_block():
    assert chosen(policies.ConsistentHash(), prompt(0), view({})) == 0


def test_consistent_hash_spreads_prompts_without_a_full_block_by_load():
    queued = [{"queued": [9]} if i != 5 else {} for i in range(8)]

    assert chosen(policies.ConsistentHash(), prompt(0), view(*queued)) == 5


def test_direct_policy_refuses_a_request_without_a_worker():
    with pytest.raises(errors.InvalidRequest, match="name its worker"):
        chosen(policies.Direct(), prompt(), view({}))


def test_decode_worker_has_fewest_blocks_in_use_or_to_compute():
    asked = prompt(is_prefilled=True)

    assert policies.select_decode_worker(
        asked, view({"active_blocks": 5}, {"active_blocks": 4}), 0.0
    ) == (
        Worker(1),
        0.0,
    )
    # 32 tokens to compute are two blocks
    busy = view({"active_blocks": 5}, {"active_blocks": 4, "queued": (32,)})
    assert policies.select_decode_worker(asked, busy, 0.0).worker == Worker(0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_decode_worker_has_fewest_requests_among_equals(numbers):
    seen = view(*({"num_requests": number} for number in numbers))

    chosen = policies.select_decode_worker(prompt(is_prefilled=True), seen, 0.0).worker.instance_id
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
