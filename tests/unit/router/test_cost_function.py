"""The cost functions of Dynamo's router, and the policies that use them."""

import random

import pytest
from tests.unit.router.views import chosen, prompt, view

from dynamo.router import api, cost_function
from dynamo.router.api import Worker

W1, W2, W3 = Worker(1), Worker(2), Worker(3)


def test_logits_equal_those_of_dynamos_documents():
    blocks = {"W1": (8, 10), "W2": (5, 5), "W3": (2, 9)}

    logits = {name: cost_function.logit(1.0, *b) for name, b in blocks.items()}

    assert logits == {"W1": 18, "W2": 10, "W3": 11}


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.1635, 0.4444, 0.3922]), (0.1, [0.0, 0.777, 0.223])],
)
def test_probabilities_equal_those_of_dynamos_documents(temperature, expected):
    found = cost_function.probabilities([18, 10, 11], temperature)

    assert found == pytest.approx(expected, abs=5e-4)
    assert sum(found) == pytest.approx(1)


def test_equal_costs_are_equally_likely():
    assert cost_function.probabilities([7, 7], 0.5) == [0.5, 0.5]


def test_temperature_zero_picks_a_lowest_cost():
    rng = random.Random(1)

    assert cost_function.pick([3, 1, 2], 0, rng.random) == 1
    assert {cost_function.pick([1, 2, 1], 0, rng.random) for _ in range(50)} == {0, 2}


def test_draws_follow_the_probabilities():
    rng = random.Random(1)

    picks = [cost_function.pick([18, 10, 11], 1.0, rng.random) for _ in range(4000)]

    assert [picks.count(i) / 4000 for i in range(3)] == pytest.approx([0.16, 0.44, 0.39], abs=0.03)


def test_a_draw_just_below_one_picks_the_last():
    assert cost_function.pick([1, 2], 1.0, lambda: 1 - 1e-17) == 1


def test_prefill_blocks_count_queued_and_new_tokens():
    assert cost_function.potential_prefill_blocks(32, 100, 2, 16) == (32 + 100 - 32) / 16


def test_unknown_load_counts_the_whole_prompt():
    prefill = cost_function.potential_prefill_blocks(None, 100, 2, 16)

    assert prefill == 6.25
    assert cost_function.potential_decode_blocks(None, 3, prefill) == 6
    assert cost_function.potential_decode_blocks(10, 3, prefill) == 13


def test_blocks_of_slower_tiers_count_by_weight():
    overlaps = api.OverlapScores({"device": {W1: 2}, "host": {W1: 4, W2: 1}, "disk": {W3: 4}})

    assert cost_function.cached_blocks(overlaps, cost_function.DEFAULT_TIER_WEIGHTS) == {
        W1: 5.0,
        W2: 0.75,
        W3: 1.0,
    }


def test_device_weight_below_one_scales_device_blocks():
    overlaps = api.OverlapScores({"device": {W1: 2}})

    assert cost_function.cached_blocks(overlaps, {"device": 0.5}) == {W1: 1.0}


def test_lmetric_is_a_product():
    assert cost_function.lmetric(3, 4) == 15


def test_a_tier_without_a_weight_counts_like_the_lowest_one():
    overlaps = api.OverlapScores({"device": {W1: 1}, "peer": {W1: 4}})

    assert cost_function.cached_blocks(overlaps) == {W1: 2.0}


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
    decision = cost_function.Dynamo(draw=draw).select_worker(prompt(), documented(), 0.0)

    assert (decision.worker.instance_id, decision.overlap_blocks) == (1, 5)


def test_larger_overlap_weight_prefers_cached_blocks():
    assert chosen(cost_function.Dynamo(draw=draw, overlap_weight=2.0), prompt(), documented()) == 2


def test_blocks_of_requests_in_flight_are_not_new():
    seen = view({"active_blocks": 5}, {"active_blocks": 5}, in_flight={1: 3})

    assert chosen(cost_function.Dynamo(draw=draw), prompt(), seen) == 1


def test_queued_prefill_raises_the_cost():
    assert chosen(cost_function.Dynamo(draw=draw), prompt(), view({"queued": [16]}, {})) == 1


def test_lmetric_selects_the_lowest_product():
    seen = view({"active_blocks": 0}, {"active_blocks": 30}, cached={1: 9}, in_flight={1: 9})

    assert chosen(cost_function.LMetric(draw=draw), prompt(), seen) == 1
