"""The delay of the event loop, measured on a virtual clock."""

import asyncio

from dynamo.observability import loop_delay, metrics
from dynamo.testing import clock


class LateClock(clock.VirtualClock):
    """A clock whose sleeps last `late_s` seconds too long."""

    late_s = 0.0

    async def sleep(self, duration_s):
        await super().sleep(duration_s + self.late_s)


async def test_delays_are_recorded_and_stalls_counted():
    time, registry = LateClock(), metrics.Registry("t")
    task = asyncio.ensure_future(loop_delay.LoopDelay(registry, time).watch())
    await time.advance(1.05)
    time.late_s = 0.5
    await time.advance(0.75)  # the running sleep ends in time, the next one late
    task.cancel()
    lines = registry.render().decode().splitlines()

    assert 't_event_loop_delay_seconds_bucket{le="0.25"} 11.0' in lines
    assert "t_event_loop_delay_seconds_count 12.0" in lines
    assert "t_event_loop_stall_total 1.0" in lines
