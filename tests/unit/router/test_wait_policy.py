"""The rule for requests that wait for a worker."""

import pytest

from dynamo.router import retry_rules

POLICY = retry_rules.WaitPolicy(wait_s=5.0, max_waiting=2)


@pytest.mark.parametrize(("start_s", "expected_s"), [(None, 5.0), (1.0, 5.0), (60.0, 90.0)])
def test_request_waits_as_long_as_a_start_takes_or_the_default(start_s, expected_s):
    assert POLICY.limit_s(start_s) == expected_s


def test_requests_beyond_the_limit_do_not_wait():
    assert [POLICY.has_room(num_waiting) for num_waiting in range(4)] == [True, True, False, False]
