"""The gate: room, order, patience."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.frontend.admission import metrics, permits
from dynamo.observability import metrics as observed
from dynamo.testing import clock as virtual


class Caller:
    """Of an exchange, what the gate needs."""

    def on_disconnect(self, callback):
        self.leave = callback


class Rig:
    def __init__(self, *, limit=None, queue=0, timeout_s=60.0):
        self.num_free = None
        self.registry = observed.Registry("f")
        self.clock = virtual.VirtualClock()
        rules = permits.AdmissionPolicy(
            concurrency_limit=limit, queue_limit=queue, queue_timeout_s=timeout_s
        )
        self.permits = permits.ModelPermits(
            "M", rules, lambda: self.num_free, metrics.AdmissionMetrics(self.registry),
            self.clock,
        )  # fmt: skip
        self.entered = []

    async def enter(self, name="", *, priority=0, caller=None, pinned=False):
        await self.permits.acquire_permit(
            caller or Caller(), priority=priority, num_tokens=7, ignores_load=pinned
        )
        self.entered.append(name)

    def row(self, start):
        lines = self.registry.render().decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(start)]


async def turns():
    """Let all that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_rules_everybody_comes_in():
    rig = Rig()
    for _ in range(100):
        await rig.enter()

    assert len(rig.entered) == 100


async def test_above_the_limit_it_refuses_until_somebody_leaves():
    rig = Rig(limit=1)
    await rig.enter("first")
    with pytest.raises(errors.Overloaded, match="the limit") as caught:
        await rig.enter("second")
    rig.permits.release_permit()
    await rig.enter("third")

    assert rig.entered == ["first", "third"]
    assert caught.value.retry_after_s >= 1
    assert rig.row('f_admission_rejection_total{gate="request_concurrency",model="m"}') == [1]


async def test_when_all_workers_are_busy_it_refuses_in_the_originals_words():
    rig = Rig()
    rig.num_free = 0
    with pytest.raises(errors.Overloaded) as caught:
        await rig.enter()

    assert str(caught.value) == "All workers are busy, please retry later"
    assert rig.row('f_admission_rejection_total{gate="workers_busy",model="m"}') == [1]


async def test_who_has_chosen_its_worker_does_not_ask_whether_others_are_busy():
    rig = Rig(limit=1)
    rig.num_free = 0
    await rig.enter(pinned=True)
    with pytest.raises(errors.Overloaded, match="the limit"):
        await rig.enter(pinned=True)

    assert len(rig.entered) == 1


async def test_the_line_goes_by_priority_and_then_by_arrival_and_nobody_overtakes_it():
    rig = Rig(limit=1, queue=4)
    await rig.enter("inside")
    waiting = [asyncio.ensure_future(rig.enter(*who)) for who in (("a",), ("b",))]
    waiting.append(asyncio.ensure_future(rig.enter("urgent", priority=5)))
    await turns()
    pending = rig.row("f_admission_queue_pending_requests{")
    tokens = rig.row("f_admission_queue_pending_isl_tokens{")
    rig.permits.release_permit()
    late = asyncio.ensure_future(rig.enter("late"))
    for _ in range(3):
        await turns()
        rig.permits.release_permit()
    await asyncio.gather(*waiting, late)

    assert rig.entered == ["inside", "urgent", "a", "b", "late"]
    assert (pending, tokens) == ([3], [21])
    assert rig.row("f_admission_queue_pending_requests{") == [0]


async def test_each_look_lets_one_in_for_each_free_worker():
    rig = Rig(queue=9)
    rig.num_free = 0
    waiting = [asyncio.ensure_future(rig.enter(number)) for number in range(5)]
    await turns()
    rig.num_free = 2
    rig.permits.admit_waiting()
    await turns()
    first = list(rig.entered)
    rig.permits.admit_waiting()
    rig.permits.admit_waiting()
    await asyncio.gather(*waiting)

    assert first == [0, 1]
    assert rig.entered == [0, 1, 2, 3, 4]


async def test_a_full_line_refuses_at_once():
    rig = Rig(limit=1, queue=1)
    await rig.enter()
    waiting = asyncio.ensure_future(rig.enter())
    await turns()
    with pytest.raises(errors.Overloaded):
        await rig.enter()
    rig.permits.release_permit()
    await waiting

    assert rig.row(
        'f_admission_queue_backpressure_total{model="m",policy_class="default",reason="full"'
    ) == [1]


async def test_request_is_refused_and_leaves_the_queue_after_the_queue_timeout():
    rig = Rig(limit=1, queue=1, timeout_s=10.0)
    await rig.enter()
    waiting = asyncio.ensure_future(rig.enter())
    await turns()
    await rig.clock.advance(9.9)
    assert not waiting.done()
    await rig.clock.advance(0.2)
    with pytest.raises(errors.Overloaded):
        await waiting
    rig.permits.release_permit()
    await rig.enter("next")

    assert rig.entered[-1] == "next"
    assert rig.row(
        'f_admission_queue_backpressure_total{model="m",policy_class="default",reason="timeout"'
    ) == [1]
    assert rig.row("f_admission_queue_pending_requests{") == [0]


async def test_a_client_that_goes_away_leaves_the_line_at_once():
    rig, caller = Rig(limit=1, queue=1), Caller()
    await rig.enter()
    waiting = asyncio.ensure_future(rig.enter(caller=caller))
    await turns()
    caller.leave()
    with pytest.raises(errors.Cancelled):
        await waiting
    successor = asyncio.ensure_future(rig.enter("successor"))
    await turns()
    rig.permits.release_permit()
    await successor

    assert rig.entered == ["", "successor"]


async def test_a_client_that_goes_in_the_turn_in_which_it_is_let_in_holds_its_slot_until_its_end_is_told():
    rig, caller = Rig(limit=1, queue=1), Caller()
    await rig.enter()
    waiting = asyncio.ensure_future(rig.enter("both", caller=caller))
    await turns()
    rig.permits.release_permit()
    caller.leave()
    await waiting
    successor = asyncio.ensure_future(rig.enter("successor"))
    await turns()
    before = list(rig.entered)
    rig.permits.release_permit()
    await successor

    assert before == ["", "both"]
    assert rig.entered == ["", "both", "successor"]
