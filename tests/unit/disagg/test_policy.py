"""Where a prompt is computed."""

import pytest

from dynamo.disagg import policy

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
