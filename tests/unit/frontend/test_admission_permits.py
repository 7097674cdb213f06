"""Permits of a model: limits, order of the queue, and its timeout."""

import asyncio

import pytest

from dynamo.base import errors
from dynamo.frontend.admission import controller, metrics
from dynamo.observability import metrics as observed
from dynamo.testing import clock as virtual


class Caller:
    """The part of an exchange that permits use."""

    def on_disconnect(self, callback):
        self.leave = callback


class Rig:
    def __init__(self, *, limit=None, queue=0, timeout_s=60.0):
        self.num_free = None
        self.registry = observed.Registry("f")
        self.clock = virtual.VirtualClock()
        rules = controller.AdmissionPolicy(
            concurrency_limit=limit, queue_limit=queue, queue_timeout_s=timeout_s
        )
        self.permits = controller.ModelPermits(
            "M", rules, lambda: self.num_free, metrics.AdmissionMetrics(self.registry),
            self.clock,
        )  # fmt: skip
        self.entered = []

    async def enter(self, name="", *, priority=0, caller=None, is_worker_busy=None, tenant=""):
        await self.permits.acquire_permit(
            caller or Caller(),
            priority=priority,
            num_tokens=7,
            tenant=tenant,
            is_worker_busy=is_worker_busy,
        )
        self.entered.append(name)

    def row(self, start):
        lines = self.registry.render().decode().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(start)]


async def turns():
    """Let all that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_are_admitted_without_limits():
    rig = Rig()
    for _ in range(100):
        await rig.enter()

    assert len(rig.entered) == 100


async def test_request_above_the_limit_is_refused_until_a_permit_is_released():
    rig = Rig(limit=1)
    await rig.enter("first")
    with pytest.raises(errors.Overloaded, match="the limit") as caught:
        await rig.enter("second")
    rig.permits.release_permit()
    await rig.enter("third")

    assert rig.entered == ["first", "third"]
    assert caught.value.retry_after_s >= 1
    assert rig.row('f_admission_rejection_total{gate="request_concurrency",model="m"}') == [1]


async def test_request_is_refused_in_the_originals_words_when_all_workers_are_busy():
    rig = Rig()
    rig.num_free = 0
    with pytest.raises(errors.Overloaded) as caught:
        await rig.enter()

    assert str(caught.value) == "All workers are busy, please retry later"
    assert rig.row('f_admission_rejection_total{gate="workers_busy",model="m"}') == [1]


async def test_request_for_one_instance_ignores_other_busy_workers():
    rig = Rig(limit=1)
    rig.num_free = 0
    await rig.enter(is_worker_busy=False)
    with pytest.raises(errors.Overloaded, match="the limit"):
        await rig.enter(is_worker_busy=False)

    assert len(rig.entered) == 1


async def test_request_for_a_busy_instance_is_refused_at_once():
    rig = Rig(queue=4)
    rig.num_free = 1
    with pytest.raises(errors.Overloaded):
        await rig.enter(is_worker_busy=True)

    assert rig.entered == []


async def test_queue_admits_by_priority_then_arrival_and_is_not_overtaken():
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


async def test_one_waiting_request_is_admitted_for_each_free_worker():
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


async def test_full_queue_refuses_at_once():
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


async def test_tenant_that_fills_the_queue_makes_room_for_another():
    rig = Rig(limit=1, queue=2)
    await rig.enter("inside", tenant="a")
    waiting = [asyncio.ensure_future(rig.enter(name, tenant="a")) for name in ("a1", "a2")]
    await turns()
    other = asyncio.ensure_future(rig.enter("b", tenant="b"))
    with pytest.raises(errors.Overloaded):
        await waiting[1]
    rig.permits.release_permit()
    await waiting[0]
    rig.permits.release_permit()
    await other

    assert rig.entered == ["inside", "a1", "b"]
    assert rig.row("f_admission_queue_pending_requests{") == [0]


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


async def test_disconnected_client_leaves_the_queue_at_once():
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


async def test_client_that_disconnects_while_admitted_holds_its_permit_until_its_request_ends():
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


async def test_permit_released_as_a_waiting_client_leaves_goes_to_the_next():
    rig, caller = Rig(limit=1, queue=2), Caller()
    await rig.enter("first")
    leaving = asyncio.ensure_future(rig.enter("leaving", caller=caller))
    await turns()
    waiting = asyncio.ensure_future(rig.enter("waiting"))
    await turns()
    caller.leave()
    rig.permits.release_permit()  # in the same turn of the event loop
    with pytest.raises(errors.Cancelled):
        await leaving
    await waiting

    assert rig.entered == ["first", "waiting"]


async def test_request_that_is_cancelled_as_it_is_admitted_gives_its_permit_back():
    rig = Rig(limit=1, queue=1)
    await rig.enter("first")
    cancelled = asyncio.ensure_future(rig.enter("cancelled"))
    await turns()
    rig.permits.release_permit()
    cancelled.cancel()  # in the same turn of the event loop, as gRPC does when a client has gone
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    following = asyncio.ensure_future(rig.enter("next"))
    await turns()
    following.cancel()

    assert rig.entered == ["first", "next"]
