"""Where a prompt is computed."""

import pytest

from dynamo.disagg import policy
from dynamo.router import api as routing

LIMITS = policy.Limits(max_local_prefill_length=1000, max_prefill_queue_size=2)


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
def test_a_long_prompt_goes_away_while_few_wait_there(length, queue_size, expected):
    assert policy.goes_away(length, queue_size, LIMITS) is expected


def test_a_change_replaces_what_it_names():
    changed = LIMITS.changed(policy.Change(max_local_prefill_length=0))

    assert changed == policy.Limits(max_local_prefill_length=0, max_prefill_queue_size=2)


def test_the_key_is_the_originals():
    assert policy.key_of("m") == "public/components/disagg_router/models/chat/m"


def look(num_new, **facts):
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
def test_the_originals_condition_is_both_few_tokens_and_a_small_share(
    prompt_len, num_new, expected
):
    one = policy.Conditional()

    assert one.may_go(prompt_len, 99)
    assert one.goes(prompt_len, 99, look(num_new), look(0)) is expected


BUSY, CALM = look(0, num_steps_ahead=2.1), look(0, num_steps_ahead=2.0)
NEW, KNOWN = look(4000), look(100)


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
def test_a_prompt_may_stay_because_prefill_workers_are_busy(kind, here, there, expected):
    one = policy.Conditional(policy=kind, prefill_busy_threshold=2)

    assert one.goes(4000, 0, here, there) is expected


@pytest.mark.parametrize(("share", "expected"), [(0.9, False), (0.91, True), (None, True)])
def test_none_stays_where_blocks_are_short(share, expected):
    one = policy.Conditional(decode_busy_threshold=0.9)

    assert one.goes(4000, 0, look(100, share_in_use=share), CALM) is expected


def test_lengths_may_be_limited_anew():
    one = policy.Lengths(LIMITS)
    before = one.may_go(500, 0), one.goes(2000, 0, look(1001), look(0))
    one.change(policy.Change(max_local_prefill_length=400))

    assert before == (False, True)
    assert one.may_go(500, 0)
    assert not one.goes(500, 0, look(400), look(0))
