"""Where a prompt delays everybody least."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.disagg import estimated
from dynamo.router import api as routing

PACE = 10_000.0
ONE = estimated.Estimated()


def goes(here, there=None):
    num_new = here["num_new"]
    here = routing.LoadEstimate(**{"tokens_per_s": PACE} | here)
    there = routing.LoadEstimate(**{"num_new": num_new, "tokens_per_s": PACE} | (there or {}))
    return ONE.goes(num_new, 0, lambda: here, lambda: there)


@pytest.mark.parametrize("num_new", [1, 64, 1500, 100_000])
def test_where_nothing_runs_and_nothing_waits_a_prompt_stays(num_new):
    assert not goes({"num_new": num_new})


def test_beside_answers_that_are_written_even_a_short_one_goes():
    assert goes({"num_new": 64, "num_requests": 8})
    assert not goes({"num_new": 4, "num_requests": 8})  # less than the handing over


def test_it_goes_if_more_waits_here_than_there():
    assert goes({"num_new": 100, "num_ahead": 1000})
    assert not goes({"num_new": 100, "num_ahead": 1000}, {"num_ahead": 1000})
    assert not goes({"num_new": 100, "num_requests": 8}, {"num_ahead": 2000})


def test_what_the_prefill_worker_knows_is_not_computed():
    assert goes({"num_new": 1000}, {"num_new": 10})


def test_a_slow_copy_keeps_it_here():
    assert goes({"num_new": 1000, "num_requests": 1})
    assert not goes({"num_new": 1000, "num_requests": 1, "copies_per_s": PACE / 2})


@given(
    st.integers(0, 10_000), st.integers(0, 64), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e6)
)  # fmt: skip
def test_more_work_here_never_keeps_it_here(num_new, num_requests, ahead, there, copies_per_s):
    few = {"num_new": num_new, "num_ahead": ahead, "num_requests": num_requests}
    few["copies_per_s"] = copies_per_s
    more = few | {"num_ahead": ahead + 1, "num_requests": num_requests + 1}

    assert goes(few, {"num_ahead": there}) <= goes(more, {"num_ahead": there})


def test_any_prompt_may_go():
    assert ONE.may_go(1, 10**6)
