"""Where a prompt is computed."""

import pytest

from dynamo.disagg import policy
from dynamo.router import policy as routing

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


def look(num_new):
    return lambda: routing.Prospect(num_new=num_new)


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
    one = policy.IslBounding()

    assert one.may_go(prompt_len, 99)
    assert one.goes(prompt_len, 99, look(num_new), look(0)) is expected


def test_lengths_may_be_limited_anew():
    one = policy.Lengths(LIMITS)
    before = one.may_go(500, 0), one.goes(2000, 0, look(1001), look(0))
    one.change(policy.Change(max_local_prefill_length=400))

    assert before == (False, True)
    assert one.may_go(500, 0)
    assert not one.goes(500, 0, look(400), look(0))
