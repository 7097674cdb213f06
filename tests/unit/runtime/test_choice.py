"""Which instance is asked: round robin is fair, whatever comes and goes; who is down is asked last."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime import choice

ids_ = st.lists(st.integers(1, 2**62), min_size=1, max_size=9, unique=True).map(sorted)


@given(ids_, st.integers(0, 2**62))
def test_round_robin_asks_each_once_before_anyone_twice(ids, last):
    asked = []
    for _ in ids:
        last = choice.round_robin(ids, last)
        asked.append(last)

    assert sorted(asked) == ids


def test_round_robin_continues_after_the_last_chosen_instance_left():
    assert choice.round_robin([10, 30], 20) == 30
    assert choice.round_robin([10, 30], 30) == 10


def test_random_choice_is_uniform_and_reproducible_by_seed():
    draws = [choice.at_random([1, 2, 3], random.Random(7).randrange) for _ in range(2)]
    draw = random.Random(7).randrange
    counts = Counter(choice.at_random([1, 2, 3], draw) for _ in range(3000))

    assert draws[0] == draws[1]
    assert all(900 < counts[i] < 1100 for i in (1, 2, 3))


def test_all_instances_are_candidates_without_failures():
    ids = (1, 2, 3)

    assert choice.candidates(ids, {}, 0.0, ()) is ids


def test_failed_instance_is_no_candidate_until_its_deadline():
    assert choice.candidates((1, 2, 3), {2: 5.0}, 4.9, ()) == [1, 3]
    assert choice.candidates((1, 2, 3), {2: 5.0}, 5.0, ()) == [1, 2, 3]


def test_failed_instances_are_candidates_if_no_other_is_left():
    assert choice.candidates((1, 2), {1: 5.0, 2: 5.0}, 4.0, ()) == [1, 2]
    assert choice.candidates((1, 2), {2: 5.0}, 4.0, {1}) == [2]


@given(ids_, st.data())
def test_tried_instances_are_never_candidates_again(ids, data):
    tried = data.draw(st.sets(st.sampled_from(ids)))
    down = data.draw(st.dictionaries(st.sampled_from(ids), st.floats(0, 10)))
    found = choice.candidates(ids, down, 5.0, tried)

    assert set(found) <= set(ids) - tried
    assert bool(found) == (set(ids) != tried)
