"""Which worker a conversation goes to."""

from dynamo.router import api, kv_router

HERE, THERE = api.Worker(1), api.Worker(2)


def test_a_session_keeps_its_worker_for_its_time():
    sessions = kv_router.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)

    assert sessions.find_worker("s", {HERE, THERE}, now=109) == HERE
    assert sessions.find_worker("s", {HERE, THERE}, now=110) is None


def test_each_request_begins_the_time_anew():
    sessions = kv_router.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)
    sessions.assign_worker("s", HERE, now=109)

    assert sessions.find_worker("s", {HERE}, now=115) == HERE


def test_a_worker_that_is_gone_is_not_given():
    sessions = kv_router.SessionAffinity(10)
    sessions.assign_worker("s", HERE, now=100)

    assert sessions.find_worker("s", {THERE}, now=101) is None


def test_an_unknown_session_has_no_worker():
    assert kv_router.SessionAffinity(10).find_worker("s", {HERE}, now=0) is None


def test_the_sessions_used_longest_ago_are_forgotten_first():
    sessions = kv_router.SessionAffinity(10, max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.assign_worker(name, HERE, now=0)

    assert len(sessions) == 2
    assert sessions.find_worker("b", {HERE}, now=1) is None
    assert sessions.find_worker("a", {HERE}, now=1) == HERE
