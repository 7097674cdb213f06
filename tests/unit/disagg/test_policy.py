"""Prefill policies: whether a prompt is computed by the answering worker or by a prefill worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.disagg import policy
from dynamo.router import api as routing

LIMITS = policy.LocalPrefillLimits(max_local_prefill_length=1000, max_prefill_queue_size=2)


@pytest.mark.parametrize(
    ("length", "queue_size", "expected"),
    [
        (1001, 0, True),
        (1000, 0, False),
        (1001, 1, True),
        (1001, 2, False),
        (10**6, None, False),
    ],
)
def test_long_prompt_is_remote_while_few_prompts_wait_there(length, queue_size, expected):
    assert LIMITS.allow_remote(length, queue_size) is expected


def test_change_replaces_the_limits_that_it_sets():
    changed = LIMITS.with_change(policy.LimitsChange(max_local_prefill_length=0))

    assert changed == policy.LocalPrefillLimits(
        max_local_prefill_length=0, max_prefill_queue_size=2
    )


def test_limits_have_the_originals_key_in_discovery():
    assert policy.limits_key("m") == "public/components/disagg_router/models/chat/m"


def load(num_new, **facts):
    return lambda: routing.LoadEstimate(num_new=num_new, **facts)


@pytest.mark.parametrize(
    ("prompt_len", "num_new", "expected"),
    [
        (4000, 2048, True),  # much is new
        (4000, 2047, False),
        (100, 100, True),  # all is new, however short
        (100, 70, True),
        (100, 69, False),
    ],
)
def test_prompt_is_local_if_few_tokens_and_a_small_share_are_new(prompt_len, num_new, expected):
    chosen = policy.ConditionalPolicy()

    assert chosen.may_be_remote(prompt_len, 99)
    assert chosen.is_remote(prompt_len, 99, load(num_new), load(0)) is expected


BUSY, CALM = load(0, num_steps_ahead=2.1), load(0, num_steps_ahead=2.0)
NEW, KNOWN = load(4000), load(100)


@pytest.mark.parametrize(
    ("kind", "here", "there", "expected"),
    [
        ("prefill_load", KNOWN, CALM, True),
        ("prefill_load", NEW, BUSY, False),
        ("isl_or_load", NEW, CALM, True),
        ("isl_or_load", KNOWN, CALM, False),
        ("isl_or_load", NEW, BUSY, False),
        ("isl_bounding", NEW, BUSY, True),
    ],
)
def test_prompt_is_local_while_prefill_workers_are_busy(kind, here, there, expected):
    chosen = policy.ConditionalPolicy(policy=kind, prefill_busy_threshold=2)

    assert chosen.is_remote(4000, 0, here, there) is expected


@pytest.mark.parametrize(("share", "expected"), [(0.9, False), (0.91, True), (None, True)])
def test_prompt_is_remote_if_the_decode_worker_has_few_blocks_left(share, expected):
    chosen = policy.ConditionalPolicy(decode_busy_threshold=0.9)

    assert chosen.is_remote(4000, 0, load(100, share_in_use=share), CALM) is expected


@pytest.mark.parametrize(("num_new", "expected"), [(0, False), (15, False), (16, True)])
def test_prompt_of_which_less_than_a_block_is_new_is_local(num_new, expected):
    """Of 4,000 tokens, with limits that send every new prompt, as vLLM's workers have them."""
    limits = policy.LocalPrefillLimits(max_local_prefill_length=0, max_prefill_queue_size=1000)
    here = load(num_new, block_size=16)

    assert policy.LengthPolicy(limits).is_remote(4000, 0, here, load(0)) is expected


@pytest.mark.parametrize(("longest", "expected"), [(0, True), (1000, False)])
def test_new_prompt_below_one_block_is_remote_if_the_limits_allow_it(longest, expected):
    """The article's 17 tokens, on a vLLM whose blocks have 128 on CPU."""
    limits = policy.LocalPrefillLimits(max_local_prefill_length=longest, max_prefill_queue_size=9)
    here = load(17, block_size=128)

    assert policy.LengthPolicy(limits).is_remote(17, 0, here, load(0)) is expected


def test_limits_of_lengths_can_change_at_run_time():
    chosen = policy.LengthPolicy(LIMITS)
    before = chosen.may_be_remote(500, 0), chosen.is_remote(2000, 0, load(1001), load(0))
    chosen.change_limits(policy.LimitsChange(max_local_prefill_length=400))

    assert before == (False, True)
    assert chosen.may_be_remote(500, 0)
    assert not chosen.is_remote(500, 0, load(400), load(0))


PACE = 10_000.0
ESTIMATE = policy.EstimatePolicy()


def is_remote(here, there=None):
    num_new = here["num_new"]
    here = routing.LoadEstimate(**{"tokens_per_s": PACE} | here)
    there = routing.LoadEstimate(**{"num_new": num_new, "tokens_per_s": PACE} | (there or {}))
    return ESTIMATE.is_remote(num_new, 0, lambda: here, lambda: there)


@pytest.mark.parametrize("num_new", [1, 64, 1500, 100_000])
def test_prompt_is_local_on_an_idle_worker(num_new):
    assert not is_remote({"num_new": num_new})


def test_short_prompt_is_remote_beside_running_answers():
    assert is_remote({"num_new": 64, "num_requests": 8})
    assert not is_remote({"num_new": 4, "num_requests": 8})  # less than the handing over


def test_prompt_is_remote_if_more_tokens_are_ahead_of_it_locally():
    assert is_remote({"num_new": 100, "num_ahead": 1000})
    assert not is_remote({"num_new": 100, "num_ahead": 1000}, {"num_ahead": 1000})
    assert not is_remote({"num_new": 100, "num_requests": 8}, {"num_ahead": 2000})


def test_prefix_cached_by_the_prefill_worker_counts():
    assert is_remote({"num_new": 1000}, {"num_new": 10})


def test_slow_copy_keeps_a_prompt_local():
    assert is_remote({"num_new": 1000, "num_requests": 1})
    assert not is_remote({"num_new": 1000, "num_requests": 1, "copies_per_s": PACE / 2})


@given(
    st.integers(0, 10_000), st.integers(0, 64), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e6)
)  # fmt: skip
def test_more_local_work_never_makes_a_prompt_local(
    num_new, num_requests, ahead, there, copies_per_s
):
    few = {"num_new": num_new, "num_ahead": ahead, "num_requests": num_requests}
    few["copies_per_s"] = copies_per_s
    more = few | {"num_ahead": ahead + 1, "num_requests": num_requests + 1}

    assert is_remote(few, {"num_ahead": there}) <= is_remote(more, {"num_ahead": there})


def test_estimate_excludes_no_prompt_beforehand():
    assert ESTIMATE.may_be_remote(1, 10**6)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (
            policy.LengthPolicy(LIMITS),
            "new to the answering worker: 1500 of 4000 tokens (remote above 1000, if they are a block or all); "
            "waiting for a prefill worker: 1 (remote below 2)",
        ),
        (
            policy.ConditionalPolicy(prefill_busy_threshold=2),
            "rule isl_bounding; new to the answering worker: 1500 of 4000 tokens (few: below 2048 and 70%); its "
            "blocks in use: 25% (busy: never); steps ahead at the prefill worker: 3.0 (busy: above 2)",
        ),
        (
            policy.EstimatePolicy(),
            "new to the answering worker: 1500 of 4000 tokens; requests there: 1; estimated delay of all requests: "
            "300.0 ms if it computes them, 54.0 ms if a prefill worker does",
        ),
    ],
    ids=["lengths", "conditional", "estimated"],
)
def test_policy_names_its_figures_beside_their_limits(chosen, text):
    here = load(1500, num_requests=1, share_in_use=0.25)
    there = load(500, num_steps_ahead=3.0, tokens_per_s=10_000.0)

    assert chosen.explain(4000, 1, here, there) == text


def test_unknown_share_of_blocks_is_explained():
    assert "its blocks in use: unknown" in policy.ConditionalPolicy().explain(9, 0, NEW, CALM)
