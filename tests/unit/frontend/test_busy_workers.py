"""Busy workers, by their reported load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.admission import busy_workers
from dynamo.protocols import load


def state(*, active=0, total=100, waiting=0, rank=0):
    return load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=1,
            request_total_slots=8,
            num_requests_waiting=0,
            active_prefill_tokens=waiting,
            data_parallel_rank=rank,
        ),
        kv_stats=load.KvStats(kv_active_blocks=active, kv_total_blocks=total),
    )


@pytest.mark.parametrize(
    ("thresholds", "told", "expected"),
    [
        ({}, {"active": 100, "waiting": 10**6}, False),
        ({"active_decode_blocks_threshold": 0.5}, {"active": 50}, False),
        ({"active_decode_blocks_threshold": 0.5}, {"active": 51}, True),
        ({"active_decode_blocks_threshold": 0.0}, {"active": 0, "total": 0}, False),
        ({"active_decode_blocks_threshold": 0.5}, {"active": 5, "total": 0}, False),  # unknown
        ({"active_prefill_tokens_threshold": 10}, {"waiting": 10}, False),
        ({"active_prefill_tokens_threshold": 10}, {"waiting": 11}, True),
        ({"active_prefill_tokens_threshold_frac": 1.5}, {"waiting": 768}, False),
        ({"active_prefill_tokens_threshold_frac": 1.5}, {"waiting": 769}, True),
        ({"active_decode_blocks_threshold": 0.9, "active_prefill_tokens_threshold": 1}, {"waiting": 2}, True),
    ],
)  # fmt: skip
def test_worker_above_any_threshold_is_busy(thresholds, told, expected):
    assert (
        busy_workers.is_busy(state(**told), busy_workers.BusyThresholds(**thresholds), 512)
        == expected
    )


def test_threshold_in_batches_is_ignored_without_a_known_batch():
    thresholds = busy_workers.BusyThresholds(active_prefill_tokens_threshold_frac=0.1)

    assert not busy_workers.is_busy(state(waiting=10**6), thresholds, 0)


@given(
    heard=st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 100), st.floats(0, 20))),
    asked=st.sets(st.integers(0, 8)),
)
def test_busy_workers_are_those_with_a_recent_high_load(heard, asked):
    loads, thresholds = (
        busy_workers.WorkerLoads(),
        busy_workers.BusyThresholds(active_decode_blocks_threshold=0.5),
    )
    for worker, (active, at) in heard.items():
        loads.update_load(load.LoadEvent(worker_id=worker, data=state(active=active)), at)
    found = loads.select_busy(asked, thresholds, 0, 20.0)
    loads.drop_stale(20.0)

    assert found == {
        one for one in asked
        if one in heard and heard[one][0] > 50 and 20.0 - heard[one][1] <= busy_workers.STALE_S
    }  # fmt: skip
    assert found == loads.select_busy(asked, thresholds, 0, 20.0)
    assert len(loads) == sum(20.0 - at <= busy_workers.STALE_S for _, at in heard.values())


@pytest.mark.parametrize(
    ("ranks", "expected"), [([90, 90], True), ([90, 10], False), ([10, 90], False)]
)
def test_worker_is_busy_when_all_its_ranks_are(ranks, expected):
    loads, thresholds = (
        busy_workers.WorkerLoads(),
        busy_workers.BusyThresholds(active_decode_blocks_threshold=0.5),
    )
    for rank, active in enumerate(ranks):
        loads.update_load(load.LoadEvent(worker_id=7, data=state(active=active, rank=rank)), 1.0)

    assert (7 in loads.select_busy([7], thresholds, 0, 1.0)) == expected
    assert 7 not in loads.select_busy([7], thresholds, 0, 99.0)


def test_thresholds_are_set_when_one_of_them_is():
    assert not busy_workers.BusyThresholds().are_set
    assert busy_workers.BusyThresholds(active_prefill_tokens_threshold=0).are_set
