import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.views import prompt

from dynamo.base import errors
from dynamo.router.queue import AGING, QueuedRequest, RequestQueue


def waiting(request_id, arrival=0.0, work_s=1.0, **more):
    return QueuedRequest(
        request_id=request_id, prompt=prompt(1, **more), arrival=arrival, work_s=work_s
    )


def order(queue, now=10.0):
    return "".join(w.request_id for w in queue.in_order(now))


def filled(policy, *entries, **more):
    queue = RequestQueue(policy, **more)
    for entry in entries:
        queue.push(entry)
    return queue


def test_fcfs_orders_by_arrival_minus_priority_seconds():
    queue = filled("fcfs", waiting("a", 1), waiting("b", 2), waiting("c", 3, priority=2.5))

    assert order(queue) == "cab"


def test_lcfs_reverses_the_order_of_arrival():
    assert order(filled("lcfs", waiting("a", 1), waiting("b", 2))) == "ba"


def test_deadline_defaults_to_ten_seconds():
    queue = filled(
        "deadline", waiting("a", 0), waiting("b", 5, deadline=9.0), waiting("c", 6, deadline=20.0)
    )

    assert order(queue) == "bac"


def test_wspt_prefers_short_prompts_unless_much_later():
    queue = filled(
        "wspt",
        waiting("long", 0, work_s=3),
        waiting("short", 1, work_s=0.1),
        waiting("late", 3 * AGING, work_s=0.1),
    )

    assert order(queue) == "shortlonglate"


def test_priority_divides_the_work_of_wspt():
    assert order(filled("wspt", waiting("a", 0, 3), waiting("b", 0, 4, priority=1.0))) == "ba"


@pytest.mark.parametrize("policy", ["fcfs", "wspt", "deadline", "lcfs"])
def test_overdue_request_goes_before_all_others(policy):
    queue = filled(policy, waiting("a", 0, work_s=1e6, deadline=1e6), patience_s=60.0)
    for i in range(5):
        queue.push(waiting(str(i), 70.0, work_s=0.0, deadline=71.0, priority=5.0))

    assert order(queue, now=70.0)[0] == "a"


def test_full_queue_refuses_a_request():
    queue = filled("fcfs", waiting("a"), max_size=1)

    with pytest.raises(errors.Overloaded, match="try again later"):
        queue.push(waiting("b"))


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=40))
def test_queue_holds_pushed_requests_that_were_not_removed(steps):
    queue, there = RequestQueue("wspt"), {}
    for i, (request_id, comes) in enumerate(steps):
        if comes and request_id not in there:
            there[request_id] = float(i)
            queue.push(waiting(request_id, float(i), work_s=i % 3))
        elif not comes:
            assert queue.remove(request_id) == (there.pop(request_id, None) is not None)

    assert sorted(order(queue, 1000.0)) == sorted(there)
    assert len(queue) == len(there)
    assert all(request_id in queue for request_id in there)
