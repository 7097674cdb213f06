"""When a process that died is restarted."""

from dynamo.launch import restarts


def test_pause_doubles_until_the_policy_gives_up():
    policy = restarts.RestartPolicy()

    assert [policy.pause_s(1) for _ in range(6)] == [0.5, 1, 2, 4, 8, None]


def test_process_that_ran_long_starts_with_the_first_pause_again():
    policy = restarts.RestartPolicy()
    for _ in range(restarts.MAX_RESTARTS):
        policy.pause_s(1)

    assert policy.pause_s(restarts.STABLE_S + 1) == 0.5
