"""The admission controller: lets a request go to a worker, has it wait, or refuses it.

`AdmissionController.admit` checks the rate limits of the request's API key, then acquires a permit of the model; that
the key may ask the model was checked when it was found. Both are given back when the request's meter says that the
request has ended, however it ended. Only the parts that the settings ask for run; `is_active` is false while none of
them can refuse a request.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import config
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend.admission import (
    api_keys,
    authentication,
    load_thresholds,
    metrics,
    queue,
    rate_limits,
)
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import encoders, generate
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
    """Gives permits to the requests of one model, from admission to their end; those without one wait in a queue.

    No request overtakes the queue. It moves when a request ends and when a worker reports its load; each time it admits
    one request for each worker that is not busy, because only the next report shows what that did to the worker.
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
        tenant: str = "",
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
            displaced = self._queue.displace(priority=priority, tenant=tenant)
            if displaced is None:
                raise self._make_refusal()
            if not displaced.waiter.done():
                displaced.waiter.set_exception(self._make_refusal())
        await self._wait(client, priority, num_tokens, tenant)

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

    async def _wait(
        self, client: exchange.Exchange, priority: int, num_tokens: int, tenant: str
    ) -> None:
        """Wait in the queue until admission, disconnection or timeout: each ends the same future."""
        pending: PendingPermit = asyncio.get_running_loop().create_future()
        position = self._queue.append(
            pending, priority=priority, num_tokens=num_tokens, tenant=tenant
        )
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


class AdmissionController:
    """Admits the requests of one frontend, by the rights of its clients and by the workers that are not busy."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        rights: authentication.ClientRights,
        busy_workers: load_thresholds.BusyWorkers,
        admission_metrics: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self.rights = rights
        self.busy_workers = busy_workers
        self._clock = clock
        self._metrics = admission_metrics
        self._policy = AdmissionPolicy(
            concurrency_limit=settings.rejection_frontend_request_concurrency_limit,
            queue_limit=settings.queue_limit,
            queue_timeout_s=settings.queue_timeout_secs,
        )
        if self._policy.concurrency_limit is not None:
            self._metrics.set_limit(
                metrics.RejectionReason.REQUEST_CONCURRENCY, self._policy.concurrency_limit
            )
        self._permits: dict[str, ModelPermits] = {}  # by model
        busy_workers.on_change(self.admit_waiting)

    @property
    def is_active(self) -> bool:
        """Return whether a request could be refused, or have to wait."""
        return (
            self.rights.uses_keys
            or self._policy.concurrency_limit is not None
            or self.busy_workers.is_active
        )

    async def admit(
        self,
        model: RegisteredModel,
        prompts: Sequence[generate.Request | encoders.EmbeddingRequest],
        client: exchange.Exchange,
        meter: frontend_metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Return when the request may go to a worker; a request for one instance does not wait for others.

        Raises RateLimited, Overloaded (also if that instance is busy), or Cancelled if the client went away while it
        waited.
        """
        num_tokens = sum(prompt.prompt_len for prompt in prompts)
        reservation = _Reservation(self._clock.now)
        meter.on_end = reservation.end
        api_key = self.rights.api_key_of(client)
        if api_key is not None:
            self._charge(model.name, api_key, num_tokens, client)
            reservation.accounts, reservation.num_prompt_tokens = api_key.accounts, num_tokens
        model_permits = self._permits.get(model.name)
        if model_permits is None:
            model_permits = self._permits[model.name] = ModelPermits(
                model.name,
                self._policy,
                functools.partial(self.busy_workers.num_free, model.name),
                self._metrics,
                self._clock,
            )
        try:
            await model_permits.acquire_permit(
                client,
                priority=max(prompt.priority for prompt in prompts),
                num_tokens=num_tokens,
                tenant="" if api_key is None else api_key.tenant,
                is_worker_busy=None
                if instance_id is None
                else instance_id in self.busy_workers.of_model(model),
            )
        except errors.Cancelled:
            meter.record_disconnect()
            raise
        reservation.release_permit = model_permits.release_permit

    def name_key(self, client: exchange.Exchange, meter: frontend_metrics.RequestMeter) -> None:
        """Note in a request's meter which API key it has, even if it is refused; one that was removed has no name."""
        try:
            api_key = self.rights.api_key_of(client)
        except errors.Unauthenticated:
            return
        if api_key is not None:
            meter.key_name, meter.tenant = api_key.entry.name, api_key.entry.tenant or ""

    def admit_waiting(self) -> None:
        """Admit waiting requests for which there is room now. Called when loads or thresholds have changed."""
        for model_permits in self._permits.values():
            model_permits.admit_waiting()

    def _charge(
        self, model: str, api_key: api_keys.ApiKey, num_tokens: int, client: exchange.Exchange
    ) -> None:
        """Charge the prompt to the key and its tenant. Raises RateLimited."""
        now = self._clock.now()
        try:
            rate_limits.start_response(api_key.accounts, num_tokens, now)
        except errors.RateLimited:
            self._metrics.count_rejection(metrics.RejectionReason.KEY_LIMIT, model)
            raise
        finally:
            client.headers = rate_limits.with_limit_headers(client.headers, api_key.accounts, now)


class _Reservation:
    """What one request holds until it ends: its place in the rate limits, and its permit."""

    __slots__ = ("_now", "accounts", "num_prompt_tokens", "release_permit")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.accounts: tuple[rate_limits.RateAccount, ...] = ()
        self.num_prompt_tokens = 0
        self.release_permit: Callable[[], None] | None = None

    def end(self, num_output_tokens: int) -> None:
        """Release all of it; a request that never got a permit gets the tokens of its prompt back."""
        if self.release_permit is not None:
            self.release_permit()
            rate_limits.finish_response(self.accounts, num_output_tokens, self._now())
        else:
            rate_limits.finish_response(self.accounts, -self.num_prompt_tokens, self._now())
