"""The permits of one model: a request holds one from its admission to its end; requests without one wait in a queue.

No request overtakes the queue. It moves when a request ends and when a worker reports its load; each time it admits one
request for each worker that is not busy, because only the next report shows what that request did to the worker.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import metrics, queue
from dynamo.runtime.http import exchange

ALL_BUSY = "All workers are busy, please retry later"
PendingPermit = asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """How many requests of one model may run and wait."""

    concurrency_limit: int | None  # requests that hold a permit; None: no limit
    queue_limit: int  # requests that wait
    queue_timeout_s: float


class ModelPermits:
    """Gives permits to the requests of one model.

    `num_free_workers` returns how many workers are not busy; None: no worker can be busy.
    """

    def __init__(
        self,
        model: str,
        policy: AdmissionPolicy,
        num_free_workers: Callable[[], int | None],
        admission_metrics: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._model = model
        self._policy = policy
        self._num_free_workers = num_free_workers
        self._metrics = admission_metrics
        self._clock = clock
        self._num_permits = 0  # that requests hold
        self._queue: queue.WaitingQueue[PendingPermit] = queue.WaitingQueue(policy.queue_limit)
        self._completion_rate = queue.CompletionRate()

    async def acquire_permit(
        self,
        client: exchange.Exchange,
        *,
        priority: int,
        num_tokens: int,
        is_worker_busy: bool | None = None,
    ) -> None:
        """Return with a permit, which must be released. `is_worker_busy`: whether the worker is that it has chosen.

        Raises Overloaded, or Cancelled if the client went away while it waited.
        """
        if is_worker_busy:
            raise self._make_refusal()
        has_chosen = is_worker_busy is not None
        room = self._num_unused_permits() if has_chosen else self._num_admissible()
        if room != 0 and (has_chosen or not self._queue):
            self._num_permits += 1
            return
        if self._queue.is_full:
            if self._policy.queue_limit:
                self._metrics.count_backpressure(self._model, "full")
            raise self._make_refusal()
        await self._wait(client, priority, num_tokens)

    def release_permit(self) -> None:
        """Give a permit back and admit the next waiting request."""
        self._num_permits -= 1
        self._completion_rate.record_completion(self._clock.now())
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Give permits to as many waiting requests as there is room for now."""
        room = self._num_admissible() if self._queue else 0
        num_before = len(self._queue)
        while self._queue and (room is None or room > 0):
            waiter = self._queue.pop_first().waiter
            if waiter.done():  # its client left, or its time ended, in this turn of the event loop
                continue
            waiter.set_result(None)
            self._num_permits += 1
            room = None if room is None else room - 1
        if len(self._queue) < num_before:
            self._show_queue()

    async def _wait(self, client: exchange.Exchange, priority: int, num_tokens: int) -> None:
        """Wait in the queue until admission, disconnection or timeout: each ends the same future."""
        pending: PendingPermit = asyncio.get_running_loop().create_future()
        position = self._queue.append(pending, priority=priority, num_tokens=num_tokens)
        self._show_queue()
        timer = self._clock.call_later(self._policy.queue_timeout_s, self._expire, pending)
        client.on_disconnect(lambda: _cancel(pending))
        try:
            await pending
        except asyncio.CancelledError:
            if not pending.cancelled() and pending.exception() is None:
                self.release_permit()  # it was admitted in this turn of the event loop
            raise
        finally:
            timer.cancel()
            if self._queue.remove(position):
                self._show_queue()

    def _expire(self, pending: PendingPermit) -> None:
        if not pending.done():
            self._metrics.count_backpressure(self._model, "timeout")
            pending.set_exception(self._make_refusal())

    def _num_admissible(self) -> int | None:
        return queue.count_admissible(
            self._num_permits, self._policy.concurrency_limit, self._num_free_workers()
        )

    def _num_unused_permits(self) -> int | None:
        return queue.count_admissible(self._num_permits, self._policy.concurrency_limit, None)

    def _make_refusal(self) -> errors.Overloaded:
        retry_after_s = self._completion_rate.estimate_wait_s(len(self._queue), self._clock.now())
        if self._num_unused_permits() == 0:
            self._metrics.count_rejection(metrics.RejectionReason.REQUEST_CONCURRENCY, self._model)
            message = (
                f"{self._num_permits} requests for {self._model!r} run here, which is the limit: "
                "please retry later"
            )
            return errors.Overloaded(message, retry_after_s=retry_after_s)
        self._metrics.count_rejection(metrics.RejectionReason.WORKERS_BUSY, self._model)
        return errors.Overloaded(ALL_BUSY, retry_after_s=retry_after_s)

    def _show_queue(self) -> None:
        self._metrics.set_queue(self._model, len(self._queue), self._queue.num_tokens)


def _cancel(pending: PendingPermit) -> None:
    if not pending.done():
        pending.set_exception(errors.Cancelled("the client went away while its request waited"))
