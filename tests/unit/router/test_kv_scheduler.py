"""What the scheduler of one model measures of its decisions, and what a policy that fails harms."""

import asyncio
import dataclasses

import pytest
from routing_rig import Receiver, Worker, card, request

from dynamo.base import clock as clocks
from dynamo.observability import metrics as observed
from dynamo.router import (
    api,
    config,
    kv_scheduler,
    metrics,
    prefix_index,
    replica_sync,
    route,
    worker_load,
)
from waiting import PATIENT_S


def schedule(index_of, **facts):
    """A scheduler of one worker with these facts, and the families of its metrics."""
    families = metrics.RouterMetrics(registry := observed.Registry("x"), "r")
    counts = metrics.RouteMetrics(families, "m")
    selector = config.make_selector(
        config.RouterConfig(), index_of(counts), block_size=4, draw=lambda: 0.0
    )
    scheduler = kv_scheduler.KvScheduler(
        selector,
        block_size=4,
        counts=counts,
        clock=clocks.SystemClock(),
        queue_timeout_s=PATIENT_S,
    )
    scheduler.set_workers({api.Worker(1): worker_load.Capacity(**facts)})
    return scheduler, families, registry


PROMPT = api.Prompt(num_tokens=4, block_size=4, sequence_hashes=[1])


async def test_time_of_a_decision_is_without_look_ups_for_estimates_before_it():
    class SlowIndex(prefix_index.PrefixIndex):
        def __init__(self, counts):
            super().__init__()
            self.counts = counts

        def find_matches(self, names):
            self.counts.observe_index_lookup(100.0)
            return super().find_matches(names)

    scheduler, families, _ = schedule(SlowIndex)
    scheduler.estimate_load(PROMPT)
    await scheduler.select("k", dataclasses.replace(PROMPT, is_prefilled=True), None)

    assert families.scheduling_ms.sum >= 0


async def test_worker_that_is_lost_before_its_request_leaves_has_no_counter():
    scheduler, _, registry = schedule(lambda counts: prefix_index.PrefixIndex(), max_num_seqs=1)
    await scheduler.select("a", PROMPT, None)
    waiting = asyncio.create_task(scheduler.select("b", PROMPT, None))
    await asyncio.sleep(0)
    scheduler.free_request("a")  # the other one may leave now
    scheduler.set_workers({api.Worker(2): worker_load.Capacity()})

    assert (await waiting).worker == api.Worker(1)
    assert b'worker_id="1"' not in registry.render()


async def test_request_ends_though_the_policy_fails_for_those_that_wait(world, monkeypatch):
    def fail():
        raise KeyError("a bug of a policy")

    route = await world.route(num_workers=1)
    _, receiver = await world.open()
    monkeypatch.setattr(route.scheduler, "_admit_queued", fail)
    world.workers[0].calls[0].finish()

    assert await receiver.over is None


async def test_request_counts_as_waiting_no_longer_when_the_policy_fails_for_it(world, monkeypatch):
    def fail():
        raise KeyError("a bug of a policy")

    route = await world.route(num_workers=1, facts={"max_num_seqs": 1})
    await world.open()
    monkeypatch.setattr(route.scheduler, "_admit_queued", fail)
    with pytest.raises(KeyError):
        await route.open_stream(request(), Receiver())
    monkeypatch.undo()

    assert world.metric("dynamo_frontend_router_queue_pending_requests") == 0


@pytest.mark.parametrize("is_lost", [False, True])
async def test_queued_request_starts_when_a_request_of_another_router_ends(world, is_lost):
    await world.route(1, {"max_num_seqs": 1}, router_replica_sync=True)
    load = world.made.scheduler.selector.active.loads[api.Worker(world.workers[0].id)]
    runtime = await world.runtime()
    peer = replica_sync.ReplicaSync(
        runtime, namespace="dynamo", component_name="backend", apply=lambda event: None
    )
    await peer.start()
    peer.publish_add("k", api.Decision(api.Worker(world.workers[0].id), 0.0), PROMPT)
    await world.until(lambda: load.num_requests == 1)
    opening = asyncio.create_task(world.open())
    await world.until(lambda: world.made.scheduler.selector.num_waiting == 1)
    if is_lost:
        await runtime.close()
    else:
        peer.publish_free("k")

    await opening
    await peer.close()


@pytest.mark.parametrize("is_down", [True, False])
async def test_queued_request_goes_to_a_worker_that_joins_in_its_wait(world, is_down):
    facts = {"max_num_seqs": 1}
    await world.route(2, facts)
    busy, other = world.workers
    if is_down:
        world.client.report_down(other.id)
    options = route.RoutingOptions(allowed_instances=None if is_down else frozenset((busy.id,)))
    await world.open(instance_id=busy.id)
    opening = asyncio.create_task(world.made.open_stream(request(), Receiver(), options))
    await world.until(lambda: world.made.scheduler.selector.num_waiting == 1)
    late = Worker(await world.runtime(), facts)
    await late.join()
    await world.until(lambda: late.id in world.client.instances)
    world.made.set_model_cards({each.id: card(**facts) for each in (busy, other, late)})

    await opening
    await world.until(lambda: late.calls)
    assert not other.calls
