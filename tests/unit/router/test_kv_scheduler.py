"""What the scheduler of one model measures of its decisions."""

import dataclasses

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
