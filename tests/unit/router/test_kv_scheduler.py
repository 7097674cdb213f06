"""What the scheduler of one model measures of its decisions, and what a policy that fails harms."""

import dataclasses

import pytest
from routing_rig import Receiver, request

from dynamo.base import clock as clocks
from dynamo.observability import metrics as observed
from dynamo.router import api, config, kv_scheduler, metrics, prefix_index, worker_load


async def test_time_of_a_decision_is_without_look_ups_for_estimates_before_it():
    families = metrics.RouterMetrics(observed.Registry("x"), "r")
    counts = metrics.RouteMetrics(families, "m")

    class SlowIndex(prefix_index.PrefixIndex):
        def find_matches(self, names):
            counts.observe_index_lookup(100.0)
            return super().find_matches(names)

    scheduler = kv_scheduler.KvScheduler(
        config.make_selector(config.RouterConfig(), SlowIndex(), block_size=4, draw=lambda: 0.0),
        block_size=4,
        counts=counts,
        clock=clocks.SystemClock(),
        queue_timeout_s=1.0,
    )
    scheduler.set_workers({api.Worker(1): worker_load.Capacity()})
    prompt = api.Prompt(num_tokens=4, block_size=4, sequence_hashes=[1])
    scheduler.estimate_load(prompt)
    await scheduler.select("k", dataclasses.replace(prompt, is_prefilled=True), None)

    assert families.scheduling_ms.sum >= 0


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
