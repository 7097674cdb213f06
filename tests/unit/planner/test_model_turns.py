"""The decisions about loaded models, with given times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.planner import model_turns
from dynamo.planner.model_turns import Demand, ModelTurns, ServableModel

WAITING, RUNNING = Demand(num_waiting=1), Demand(num_running=1)


def turns(*sizes, budget_gb=10.0, idle_s=300.0, pinned=()):
    """Models a, b, c … of so many GB."""
    models = [
        ServableModel(name=name, memory_gb=size, is_pinned=name in pinned)
        for name, size in zip("abcdef", sizes, strict=False)
    ]
    return ModelTurns(models, budget_gb=budget_gb, idle_s=idle_s)


def load(decider, now, *names):
    """Have models loaded at this time."""
    for name in names:
        decider.record_phase(name, "loading", now - 1)
        decider.record_phase(name, "loaded", now)


def test_model_is_loaded_for_its_first_request():
    decider = turns(4, 4)

    assert decider.decide(0, {}) == ([], [])
    assert decider.decide(1, {"a": WAITING}) == (["a"], [])


def test_models_that_fit_are_loaded_beside_each_other():
    decider = turns(4, 4, 4)
    load(decider, 0, "a")

    assert decider.decide(1, {"b": WAITING, "a": RUNNING}) == (["b"], [])


def test_idle_model_is_unloaded():
    decider = turns(4, idle_s=60)
    load(decider, 0, "a")

    assert decider.decide(30, {"a": RUNNING}) == ([], [])
    assert decider.decide(89, {}) == ([], [])
    assert decider.decide(90, {}) == ([], ["a"])


def test_pinned_model_is_loaded_without_a_request_and_stays():
    decider = turns(4, 4, pinned="a", idle_s=1)

    assert decider.decide(0, {}) == (["a"], [])
    load(decider, 1, "a")
    assert decider.decide(1000, {}) == ([], [])


def test_longest_unused_model_makes_room():
    decider = turns(5, 5, 5)
    load(decider, 0, "a", "b")
    decider.decide(40, {"a": RUNNING})

    assert decider.decide(50, {"c": WAITING}) == ([], ["b"])
    decider.record_phase("b", "unloading", 50)
    assert decider.decide(51, {"c": WAITING}) == ([], [])
    decider.record_phase("b", "unloaded", 52)
    assert decider.decide(52, {"c": WAITING}) == (["c"], [])


def test_two_models_that_do_not_fit_together_take_turns():
    decider = turns(8, 8)
    load(decider, 0, "a")
    both = {"a": RUNNING, "b": WAITING}

    assert decider.decide(29, both) == ([], [])
    assert decider.decide(30, both) == ([], ["a"])
    decider.record_phase("a", "unloading", 30)
    decider.record_phase("a", "unloaded", 31)
    assert decider.decide(31, {"a": WAITING, "b": WAITING}) == (["b"], [])


def test_model_that_has_waited_longest_goes_first_though_a_smaller_one_fits():
    decider = turns(8, 8, 2)
    load(decider, 0, "a")
    decider.decide(1, {"b": WAITING, "a": RUNNING})

    assert decider.decide(2, {"a": RUNNING, "b": WAITING, "c": WAITING}) == ([], [])


def test_nothing_is_unloaded_as_long_as_that_makes_too_little_room():
    decider = turns(5, 4, 9)
    load(decider, 0, "a")
    load(decider, 20, "b")

    assert decider.decide(35, {"c": WAITING}) == ([], [])
    assert decider.decide(50, {"c": WAITING}) == ([], ["a", "b"])


def test_model_that_could_not_be_loaded_is_tried_again_later():
    decider = turns(4)
    decider.record_phase("a", "loading", 0)
    decider.record_failure("a", 1)

    assert decider.has_failed("a", 30)
    assert decider.decide(30, {"a": WAITING}) == ([], [])
    assert decider.decide(31, {"a": WAITING}) == (["a"], [])


def test_model_is_loaded_at_its_turn_when_an_operator_asks():
    decider = turns(8, 8)
    load(decider, 0, "a")
    decider.request_load("b")

    assert decider.decide(10, {}) == ([], [])
    assert decider.decide(30, {}) == ([], ["a"])
    decider.record_phase("a", "unloading", 30)
    decider.record_phase("a", "unloaded", 31)
    assert decider.decide(31, {}) == (["b"], [])
    load(decider, 32, "b")
    decider.request_load("b")
    assert decider.decide(400, {}) == ([], ["b"])


def test_operator_need_not_wait_until_a_model_that_failed_is_tried_again():
    decider = turns(4)
    decider.record_phase("a", "loading", 0)
    decider.record_failure("a", 1)
    decider.request_load("a")

    assert decider.decide(2, {}) == (["a"], [])


def test_model_without_requests_is_unloaded_when_an_operator_asks():
    decider = turns(4)
    decider.request_unload("a", 0)
    assert decider.decide(0, {}) == ([], [])
    load(decider, 0, "a")
    decider.request_unload("a", 30)

    assert decider.decide(31, {"a": RUNNING}) == ([], [])
    assert decider.decide(32, {}) == ([], ["a"])
    decider.record_phase("a", "unloading", 32)
    decider.record_phase("a", "unloaded", 33)
    load(decider, 40, "a")
    assert decider.decide(100, {}) == ([], [])


def test_model_that_is_wanted_again_before_it_is_unloaded_stays():
    decider = turns(4)
    load(decider, 0, "a")
    decider.request_unload("a", 30)
    decider.request_load("a")

    assert decider.decide(31, {}) == ([], [])


def test_model_that_is_needed_is_not_unloaded():
    decider = turns(4, 4, pinned="b")
    load(decider, 0, "a", "b")
    with pytest.raises(errors.Conflict, match="a is not unloaded: it stays for 30 s, and has 21 s"):
        decider.request_unload("a", 9.5)
    with pytest.raises(errors.Conflict, match="b is not unloaded: it is pinned: unpin it first"):
        decider.request_unload("b", 50)
    decider.decide(50, {"a": RUNNING})
    with pytest.raises(errors.Conflict, match="requests for it wait or run"):
        decider.request_unload("a", 50)
    decider.record_phase("a", "loading", 60)
    with pytest.raises(errors.Conflict, match="it is being loaded"):
        decider.request_unload("a", 61)


def test_model_is_pinned_and_unpinned_while_it_runs():
    decider = turns(4, 5, idle_s=60)
    decider.pin("a")
    assert decider.decide(0, {}) == (["a"], [])
    load(decider, 1, "a")
    assert decider.decide(500, {}) == ([], [])
    decider.unpin("a")

    assert not decider.is_pinned("a")
    assert decider.decide(501, {}) == ([], ["a"])


def test_model_is_not_pinned_where_another_one_could_never_be_loaded_beside_it():
    decider = turns(4, 7)
    with pytest.raises(errors.Conflict, match="a is not pinned, because b can never be loaded"):
        decider.pin("a")

    assert not decider.is_pinned("a")


def test_model_that_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(
        errors.ConfigError, match=r"b can never be loaded: it takes about 12.0 GB, of 10.0 GB"
    ):
        turns(4, 12)
    with pytest.raises(
        errors.ConfigError, match=r"about 7.0 GB, and the pinned models 4.0 GB, of 10.0 GB"
    ):
        turns(4, 7, pinned="a")


def test_estimate_counts_the_turn_of_the_present_model_and_the_load():
    decider = turns(8, 8)
    decider.record_phase("a", "loading", 0)
    decider.record_phase("a", "loaded", 20)
    decider.decide(30, {"a": RUNNING, "b": WAITING})
    load_s = model_turns._FIRST_LOAD_S + 8 * model_turns._LOAD_S_PER_GB

    assert decider.estimate_s("a", 30) == 0
    assert decider.estimate_s("b", 30) == pytest.approx(20 + load_s)
    decider.record_phase("b", "loading", 50)
    assert decider.estimate_s("b", 55) == pytest.approx(load_s - 5)


@given(
    sizes=st.lists(st.floats(0.5, 10), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.integers(1, 40)), max_size=40),
)
def test_budget_is_kept_every_model_is_served_and_no_stay_is_cut_short(sizes, steps):
    decider = turns(*sizes)
    names = "abcd"[: len(sizes)]
    size_by_name = dict(zip(names, sizes, strict=True))
    now, loaded_at, asked_at = 0.0, {}, {}
    for asked, pause_s in steps:
        now += pause_s
        demand = {
            name: Demand(num_running=1) if name in loaded_at else Demand(num_waiting=1)
            for name in asked & set(names)
        }
        decision = decider.decide(now, demand)
        for name in decision.unloads:
            assert now - loaded_at.pop(name) >= model_turns.MIN_STAY_S
            decider.record_phase(name, "unloading", now)
            decider.record_phase(name, "unloaded", now)
        for name in decision.loads:
            load(decider, now, name)
            loaded_at[name] = now
        asked_at = {name: asked_at.get(name, now) for name in demand if name not in loaded_at}

        assert sum(size_by_name[name] for name in loaded_at) <= 10
        for asked_s in asked_at.values():
            assert now - asked_s <= (model_turns.MIN_STAY_S + 80) * len(sizes)
