import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.planner import policies


def test_one_server_waits_as_often_as_it_is_busy():
    assert policies.erlang_c(1, 0.7) == pytest.approx(0.7)


def test_two_servers_wait_by_erlangs_formula():
    assert policies.erlang_c(2, 1.0) == pytest.approx(1 / 3)


def test_two_threads_that_compute_one_load_at_once_do_not_spoil_it():
    class Interrupted(float):
        """A load whose computation another thread begins, too, before it has its first product."""

        is_first = True

        def __mul__(self, other):
            if self.is_first:
                self.is_first = False
                policies.erlang_c(4, float(self))
            return float(self) * other

    policies.erlang_c(4, Interrupted(1.75))

    for num_workers in (3, 6):
        alone = policies.erlang_c(num_workers, 1.75 + 2**-40)
        assert policies.erlang_c(num_workers, 1.75) == pytest.approx(alone)


def test_no_requests_need_no_worker():
    assert policies.least_workers(requests_per_s=0, service_s=0.1, waits_s={1.0: 1.0}) == 0


@given(st.floats(0.1, 200), st.floats(0.01, 1), st.floats(0, 5), st.floats(1, 6))
def test_least_workers_hold_the_wait_and_fewer_do_not(rate, service_s, wait_s, burstiness):
    case = {"requests_per_s": rate, "service_s": service_s, "burstiness": burstiness}
    number = policies.least_workers(waits_s={wait_s: 1.0}, **case)

    assert policies.late_share(number, waits_s={wait_s: 1.0}, **case) <= 0.05
    assert number == 1 or policies.late_share(number - 1, waits_s={wait_s: 1.0}, **case) > 0.05


def test_more_busy_than_servers_all_wait():
    assert policies.erlang_c(2, 2.5) == 1.0
    case = {"requests_per_s": 3, "service_s": 1, "waits_s": {9.0: 1.0}, "burstiness": 1}
    assert policies.late_share(2, **case) == 1.0


def test_share_that_is_late_is_the_mean_over_the_times_that_requests_may_wait():
    def late(waits_s):
        case = {"requests_per_s": 3, "service_s": 1, "burstiness": 1}
        return policies.late_share(4, waits_s=waits_s, **case)

    assert late({0.1: 1.0, 2.0: 3.0}) == pytest.approx((late({0.1: 1}) + 3 * late({2.0: 1})) / 4)


def test_load_that_no_cluster_carries_takes_neither_time_nor_memory():
    """A profile in wrong units makes such a load: throughputs of requests, for instance, in place of tokens."""
    busy = 1e15

    assert (
        policies.least_workers(requests_per_s=busy, service_s=1.0, waits_s={0.1: 1.0}) == busy + 1
    )
