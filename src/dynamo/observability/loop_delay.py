"""The delay of the event loop: how much later than asked the loop runs a task, which every stream of the process feels.

Ten times a second a task sleeps for `PERIOD_S` and records how much later it woke. A delay of more than `STALL_S` is a
stall: something blocked the loop, and all streams of the process stood still.
"""

from typing import NoReturn

from dynamo.base import clock
from dynamo.observability import metrics

PERIOD_S = 0.1
STALL_S = 0.1
_BUCKETS = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class LoopDelay:
    """The delay as a histogram, and stalls as a counter."""

    def __init__(self, registry: metrics.Registry, time: clock.Clock) -> None:
        self._clock = time
        family = registry.fast_histogram(
            "event_loop_delay_seconds",
            "Seconds by which the event loop ran a task later than asked",
            (),
            buckets=_BUCKETS,
        )
        self._delay = family.labels()
        self._stalls = registry.counter(
            "event_loop_stall_total", f"Times the event loop was more than {STALL_S:g} s late"
        )

    async def watch(self) -> NoReturn:
        """Measure until the task is cancelled."""
        while True:
            began_at = self._clock.now()
            await self._clock.sleep(PERIOD_S)
            delay_s = max(0.0, self._clock.now() - began_at - PERIOD_S)
            self._delay.observe(delay_s)
            if delay_s > STALL_S:
                self._stalls.inc()
