"""The admission controller: lets a request go to a worker, has it wait, or refuses it.

`AdmissionController.admit` checks the rate limits of the request's API key, then acquires a permit of the model; that
the key may ask the model was checked when it was found. Both are given back when the request's meter says that the
request has ended, however it ended. Only the parts that the settings ask for run; `is_active` is false while none of
them can refuse a request.
"""

import functools
from collections.abc import Callable, Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import config
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend.admission import (
    api_keys,
    authentication,
    load_thresholds,
    metrics,
    permits,
    rate_limits,
)
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import encoders, generate
from dynamo.runtime.http import exchange


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
        self._policy = permits.AdmissionPolicy(
            concurrency_limit=settings.rejection_frontend_request_concurrency_limit,
            queue_limit=settings.queue_limit,
            queue_timeout_s=settings.queue_timeout_secs,
        )
        if self._policy.concurrency_limit is not None:
            self._metrics.set_limit(
                metrics.RejectionReason.REQUEST_CONCURRENCY, self._policy.concurrency_limit
            )
        self._permits: dict[str, permits.ModelPermits] = {}  # by model
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
            meter.key_name, meter.tenant = api_key.entry.name, api_key.entry.tenant or ""
        model_permits = self._permits.get(model.name)
        if model_permits is None:
            model_permits = self._permits[model.name] = permits.ModelPermits(
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
                is_worker_busy=None
                if instance_id is None
                else instance_id in self.busy_workers.of_model(model),
            )
        except errors.Cancelled:
            meter.record_disconnect()
            raise
        reservation.release_permit = model_permits.release_permit

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
