"""How late the event loop is: what everything in this process waits for, beside what it asked for.

Ten times a second it asks to be woken at once-planned times, and counts how much later it was. A delay of more than
`STALL_S` is a stall: something held the loop, and all streams stood still.
"""

from typing import NoReturn

from dynamo.base import clock
from dynamo.observability import metrics

PERIOD_S = 0.1
STALL_S = 0.1
_BUCKETS = (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class LoopDelay:
    """`watch` is a long-lived task."""

    def __init__(self, registry: metrics.Registry, time: clock.Clock) -> None:
        self._clock = time
        family = registry.fast_histogram(
            "event_loop_delay_seconds", "How late the event loop was", (), buckets=_BUCKETS
        )
        self._delay = family.labels()
        self._stalls = registry.counter(
            "event_loop_stall_total", f"Times it was more than {STALL_S:g} s late"
        )

    async def watch(self) -> NoReturn:
        """For ever."""
        while True:
            asked_at = self._clock.now()
            await self._clock.sleep(PERIOD_S)
            late_s = max(0.0, self._clock.now() - asked_at - PERIOD_S)
            self._delay.observe(late_s)
            if late_s > STALL_S:
                self._stalls.inc()
