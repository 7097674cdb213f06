"""The gate of one model: lets requests in as long as there is room, and has the others wait in line.

Nobody overtakes the line. It moves when a request ends and when a worker tells its load; each time one request comes in
for each worker that is not busy, because only the next report shows what that one did to it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import metrics, queue
from dynamo.runtime.http import exchange

ALL_BUSY = "All workers are busy, please retry later"
Place = asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """How a gate is kept."""

    concurrency_limit: int | None  # requests inside; None: no limit
    queue_limit: int  # requests that wait
    queue_timeout_s: float


class ModelPermits:
    """`num_free_workers` gives how many are not busy; None: nobody is ever busy."""

    def __init__(
        self,
        model: str,
        rules: AdmissionPolicy,
        num_free_workers: Callable[[], int | None],
        counts: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._model = model
        self._rules = rules
        self._num_free_workers = num_free_workers
        self._counts = counts
        self._clock = clock
        self._num_inside = 0
        self._line: queue.WaitingQueue[Place] = queue.WaitingQueue(rules.queue_limit)
        self._pace = queue.CompletionRate()

    async def enter(
        self, caller: exchange.Exchange, *, priority: int, num_tokens: int, ignores_load: bool
    ) -> None:
        """Return inside; whoever is inside must `leave`. Who `ignores_load` has chosen its worker already.

        Raises Overloaded, or Cancelled if the client went away.
        """
        room = self._slots() if ignores_load else self._room()
        if room != 0 and (ignores_load or not self._line):
            self._num_inside += 1
            return
        if self._line.is_full:
            if self._rules.queue_limit:
                self._counts.backpressure(self._model, "full")
            raise self._refusal()
        await self._wait(caller, priority, num_tokens)

    def leave(self) -> None:
        """A request that was inside is over."""
        self._num_inside -= 1
        self._pace.ended(self._clock.now())
        self.look()

    def look(self) -> None:
        """Let in for whom there is room now."""
        room = self._room() if self._line else 0
        num_coming = len(self._line) if room is None else min(room, len(self._line))
        for _ in range(num_coming):
            self._line.next().waiter.set_result(None)
            self._num_inside += 1
        if num_coming:
            self._show_line()

    async def _wait(self, caller: exchange.Exchange, priority: int, num_tokens: int) -> None:
        """One future has three ends: let in, gone, or too late."""
        loop = asyncio.get_running_loop()
        place: Place = loop.create_future()
        ticket = self._line.join(place, priority=priority, num_tokens=num_tokens)
        self._show_line()
        timer = loop.call_later(self._rules.queue_timeout_s, self._expire, place)
        caller.on_disconnect(lambda: _give_up(place))
        try:
            await place
        finally:
            timer.cancel()
            if self._line.leave(ticket):
                self._show_line()

    def _expire(self, place: Place) -> None:
        if not place.done():
            self._counts.backpressure(self._model, "timeout")
            place.set_exception(self._refusal())

    def _room(self) -> int | None:
        rules = self._rules
        return queue.count_admissible(
            self._num_inside, rules.concurrency_limit, self._num_free_workers()
        )

    def _slots(self) -> int | None:
        return queue.count_admissible(self._num_inside, self._rules.concurrency_limit, None)

    def _refusal(self) -> errors.Overloaded:
        retry_after_s = self._pace.wait_s(len(self._line), self._clock.now())
        if self._slots() == 0:
            self._counts.rejected(metrics.RejectionReason.REQUEST_CONCURRENCY, self._model)
            message = (
                f"{self._num_inside} requests for {self._model!r} run here, which is the limit: "
                "please retry later"
            )
            return errors.Overloaded(message, retry_after_s=retry_after_s)
        self._counts.rejected(metrics.RejectionReason.WORKERS_BUSY, self._model)
        return errors.Overloaded(ALL_BUSY, retry_after_s=retry_after_s)

    def _show_line(self) -> None:
        self._counts.show_line(self._model, len(self._line), self._line.num_tokens)


def _give_up(place: Place) -> None:
    if not place.done():
        place.set_exception(errors.Cancelled("the client went away before its turn came"))
