import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner import queueing


def test_one_server_waits_as_often_as_it_is_busy():
    assert queueing.erlang_c(1, 0.7) == pytest.approx(0.7)


def test_two_servers_wait_by_erlangs_formula():
    assert queueing.erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_no_requests_need_no_worker():
    assert queueing.least_workers(requests_per_s=0, service_s=0.1, wait_s=1) == 0


@given(st.floats(0.1, 200), st.floats(0.01, 1), st.floats(0, 5), st.floats(1, 6))
def test_least_workers_hold_the_wait_and_fewer_do_not(rate, service_s, wait_s, burstiness):
    case = {"requests_per_s": rate, "service_s": service_s, "burstiness": burstiness}
    number = queueing.least_workers(wait_s=wait_s, **case)

    assert queueing.late_share(number, wait_s=wait_s, **case) <= 0.05
    assert number == 1 or queueing.late_share(number - 1, wait_s=wait_s, **case) > 0.05


def test_more_busy_than_servers_all_wait():
    assert queueing.erlang_c(2, 2.5) == 1.0
    assert queueing.late_share(2, requests_per_s=3, service_s=1, wait_s=9, burstiness=1) == 1.0
