"""The memory of workers that left, and the pages of those that are there."""

import msgspec

from dynamo.console import topology
from dynamo.console.topology import GONE_S, MAX_GONE, WorkerMemory, WorkerQuery, WorkerRow


def row(instance, **fields):
    defaults = {"model": "m", "role": "aggregated", "endpoint": "dyn://a.b.c", "address": ""}
    return WorkerRow(instance=instance, **defaults | fields)


def test_worker_that_vanishes_is_shown_as_gone_for_a_minute():
    memory = WorkerMemory()
    memory.update([row("a"), row("b", num_requests=3)], 100.0)
    shown = memory.update([row("a")], 101.0)

    assert [(one.instance, one.state, one.since) for one in shown] == [
        ("a", "ready", 100.0), ("b", "gone", 101.0)
    ]  # fmt: skip
    assert shown[1].num_requests == 0
    assert len(memory.update([row("a")], 130.0)) == 2
    assert [one.instance for one in memory.update([row("a")], 101.0 + GONE_S)] == ["a"]


def test_worker_that_returns_is_present_again():
    memory = WorkerMemory()
    memory.update([row("a")], 100.0)
    memory.update([], 101.0)

    assert [one.state for one in memory.update([row("a")], 102.0)] == ["ready"]


def test_what_was_seen_long_ago_is_forgotten():
    memory = WorkerMemory()
    memory.update([row("a")], 100.0)

    assert memory.update([], 101.0 + GONE_S) == []


def test_worker_that_drains_is_shown_until_it_is_silent_and_then_as_gone():
    memory = WorkerMemory()
    memory.update([row("a", num_requests=2)], 100.0)
    reports = lambda gone: msgspec.structs.replace(gone, state="draining", num_running=2)  # noqa: E731
    (draining,) = memory.update([], 101.0, reports)
    (later,) = memory.update([], 150.0, reports)
    (gone,) = memory.update([], 151.0)

    assert (draining.state, draining.since, draining.num_running) == ("draining", 101.0, 2)
    assert (later.state, later.since) == ("draining", 101.0)
    assert (gone.state, gone.since, gone.num_requests) == ("gone", 151.0, 0)
    assert len(memory.update([], 150.9 + GONE_S)) == 1
    assert memory.update([], 151.0 + GONE_S) == []


def test_time_of_a_state_begins_with_it_but_for_a_broken_connection():
    memory = WorkerMemory()
    since = [
        memory.update([row("a", state=state)], at)[0].since
        for at, state in enumerate(("ready", "down", "asleep", "asleep", "ready"), 100)
    ]

    assert since == [100, 100, 102, 102, 104]


def test_transfers_are_counted_by_both_workers():
    pairs = [("p", "d", True), ("p", "e", False), ("p", "e", False), ("p", "d", False)]

    assert [msgspec.structs.astuple(one) for one in topology.count_transfers(pairs)] == [
        ("p", "d", 1, 1), ("p", "e", 0, 2)
    ]  # fmt: skip


def test_memory_of_lost_workers_is_bounded():
    memory = WorkerMemory()
    memory.update([row(str(number)) for number in range(2 * MAX_GONE)], 100.0)

    assert len(memory.update([], 101.0)) == MAX_GONE


def test_page_is_sorted_and_counts_are_of_all():
    rows = [row("2"), row("1"), row("3", role="prefill"), row("4", model="a", state="down")]

    assert [one.instance for one in WorkerQuery().select(rows)] == ["4", "1", "2", "3"]
    assert [one.instance for one in WorkerQuery(model="m", offset=1, limit=1).select(rows)] == ["2"]
    assert topology.count_by(rows, "role") == {"aggregated": 3, "prefill": 1}
    assert topology.count_by(rows, "state") == {"ready": 3, "down": 1}
