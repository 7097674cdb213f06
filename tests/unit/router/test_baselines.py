import random

import pytest
from tests.unit.router.views import chosen, prompt, view

from dynamo.base import errors
from dynamo.router import baselines


def test_round_robin_takes_everybody_in_turn():
    policy = baselines.RoundRobin()

    assert [chosen(policy, prompt(), view({}, {}, {})) for _ in range(4)] == [0, 1, 2, 0]


def test_random_takes_anybody():
    policy = baselines.Random(random.Random(1).random)

    assert {chosen(policy, prompt(), view({}, {}, {})) for _ in range(50)} == {0, 1, 2}


def test_least_loaded_counts_tokens_and_then_requests():
    policy = baselines.LeastLoaded()

    assert chosen(policy, prompt(), view({"queued": [50]}, {"queued": [20, 20]})) == 1
    assert chosen(policy, prompt(), view({"num_requests": 2}, {"num_requests": 1})) == 1


def test_power_of_two_never_takes_the_most_loaded_of_three():
    policy = baselines.PowerOfTwo(random.Random(1).random)
    seen = view({}, {"queued": [9]}, {"queued": [99]})

    assert {chosen(policy, prompt(), seen) for _ in range(60)} == {0, 1}


def test_power_of_two_takes_the_only_one():
    assert chosen(baselines.PowerOfTwo(random.Random(1).random), prompt(), view({})) == 0


def test_the_hash_sends_equal_beginnings_to_one_worker_and_others_elsewhere():
    policy, seen = baselines.ConsistentHash(), view(*({} for _ in range(8)))
    short, long = prompt(128, first=1), prompt(200, first=1)

    assert chosen(policy, short, seen) == chosen(policy, long, seen)
    assert len({chosen(policy, prompt(200, first=1000 * i), seen) for i in range(50)}) == 8


def test_the_hash_moves_only_the_prompts_of_a_worker_that_goes():
    policy, all_, fewer = baselines.ConsistentHash(), view({}, {}, {}, {}), view({}, {}, {})
    prompts = [prompt(first=1000 * i) for i in range(100)]

    moved = [p for p in prompts if chosen(policy, p, all_) != chosen(policy, p, fewer)]

    assert moved == [p for p in prompts if chosen(policy, p, all_) == 3]


def test_the_hash_takes_a_prompt_without_a_full_block():
    assert chosen(baselines.ConsistentHash(), prompt(0), view({})) == 0


def test_direct_wants_to_be_told():
    with pytest.raises(errors.InvalidRequest, match="name its worker"):
        chosen(baselines.Direct(), prompt(), view({}))
