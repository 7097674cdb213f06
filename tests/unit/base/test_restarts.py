"""When a process that died is started again."""

from dynamo.base import restarts


def test_each_restart_comes_later_and_the_last_does_not_come():
    policy = restarts.Restarts()

    assert [policy.pause_s(1) for _ in range(7)] == [0.5, 1, 2, 4, 8, None, None]


def test_a_process_that_lived_long_begins_anew():
    policy = restarts.Restarts()
    for _ in range(5):
        policy.pause_s(1)

    assert policy.pause_s(restarts.STABLE_S + 1) == 0.5
