"""The admission controller: lets a request go to a worker, has it wait, or refuses it.

`AdmissionController.admit` checks the models and rate limits of the request's API key, then acquires a permit of the
model. Both are given back when the request's meter says that the request has ended, however it ended. Only the parts
that the settings ask for run; `is_active` is false while none of them can refuse a request.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors, membership, tasks
from dynamo.frontend import config
from dynamo.frontend import metrics as frontend_metrics
from dynamo.frontend.admission import (
    api_keys,
    authentication,
    busy_workers,
    load_thresholds,
    metrics,
    permits,
    rate_limits,
)
from dynamo.frontend.delivery import delivery
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import metrics as observed
from dynamo.protocols import encoders, generate
from dynamo.runtime import events
from dynamo.runtime.http import exchange

_SALT_CHARS = 32  # of a hash: 128 bits
_logger = logging.getLogger(__name__)


class AdmissionController:
    """Admits the requests of one frontend. Its watchers run in `running` once it is started."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        models: registry.ModelRegistry,
        event_plane: events.EventPlane,
        metrics_registry: observed.Registry,
        clock: clocks.Clock,
        running: tasks.Tasks,
    ) -> None:
        self._settings = settings
        self._models = models
        self._clock = clock
        self._running = running
        self._metrics = metrics.AdmissionMetrics(metrics_registry)
        self._policy = permits.AdmissionPolicy(
            concurrency_limit=settings.rejection_frontend_request_concurrency_limit,
            queue_limit=settings.queue_limit,
            queue_timeout_s=settings.queue_timeout_secs,
        )
        if self._policy.concurrency_limit is not None:
            self._metrics.set_limit(
                metrics.RejectionReason.REQUEST_CONCURRENCY, self._policy.concurrency_limit
            )
        self._key_file = (
            authentication.KeyFileWatcher(Path(settings.api_keys_file), clock)
            if settings.api_keys_file
            else None
        )
        initial_thresholds = busy_workers.BusyThresholds(
            active_decode_blocks_threshold=settings.active_decode_blocks_threshold,
            active_prefill_tokens_threshold=settings.active_prefill_tokens_threshold,
            active_prefill_tokens_threshold_frac=settings.active_prefill_tokens_threshold_frac,
        )
        self.thresholds = load_thresholds.ThresholdRegistry(
            models, initial_thresholds, self._on_thresholds_changed
        )
        self.loads = busy_workers.WorkerLoads()
        self._load_monitor = load_thresholds.LoadMonitor(
            event_plane, models, self.loads, self.admit_waiting, clock
        )
        self._is_monitoring_loads = initial_thresholds.are_set
        self._unsalted_models: set[str] = set()  # that were warned about
        self._permits: dict[str, permits.ModelPermits] = {}  # by model
        self.is_active = (
            self._key_file is not None
            or self._policy.concurrency_limit is not None
            or initial_thresholds.are_set
        )

    def load_keys(self) -> None:
        """Read the file of API keys for the first time, before the frontend listens. Raises ConfigError."""
        if self._key_file is not None:
            self._key_file.load()

    def reload_keys(self) -> None:
        """Have the file of API keys read again at once."""
        if self._key_file is not None:
            self._key_file.check_now.set()

    def start(self) -> None:
        """Start to follow the key file and the load of the workers, as far as the settings ask for it."""
        if self._key_file is not None:
            self._running.start("watch the API keys", self._key_file.watch())
        elif not membership.is_loopback(self._settings.http_host):
            _logger.warning(
                "listening on %s without API keys: every client that reaches it may use it (--api-keys-file)",
                self._settings.http_host,
            )
        if self._is_monitoring_loads:
            self._running.start("watch the workers' load", self._load_monitor.watch())

    def make_authenticator(
        self, handler: exchange.Handler, dialect_of: Callable[[str], delivery.ErrorDialect]
    ) -> authentication.KeyAuthenticator | None:
        """Return a handler that authenticates requests before `handler` gets them; None if API keys are not used."""
        if self._key_file is None:
            return None
        return authentication.KeyAuthenticator(
            handler, self._key_file.api_keys, dialect_of, self._metrics, self._clock
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

        Raises Forbidden, RateLimited, Overloaded (also if that instance is busy), or Cancelled if the client went away
        while it waited.
        """
        num_tokens = sum(prompt.prompt_len for prompt in prompts)
        reservation = _Reservation(self._clock.now)
        meter.on_end = reservation.end
        if self._key_file is not None:
            api_key = self._key_file.api_keys.authenticate(client.request.headers)
            self._charge(model.name, api_key, num_tokens, client)
            reservation.accounts, reservation.num_prompt_tokens = api_key.accounts, num_tokens
            meter.key_name, meter.tenant = api_key.entry.name, api_key.entry.tenant or ""
        model_permits = self._permits.get(model.name)
        if model_permits is None:
            name = model.name
            model_permits = self._permits[name] = permits.ModelPermits(
                name,
                self._policy,
                lambda: self._num_free_workers(name),
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
                else instance_id in self.busy_workers(model),
            )
        except errors.Cancelled:
            meter.record_disconnect()
            raise
        reservation.release_permit = model_permits.release_permit

    def admit_waiting(self) -> None:
        """Admit waiting requests for which there is room now. Called when loads or thresholds have changed."""
        for model_permits in self._permits.values():
            model_permits.admit_waiting()

    def busy_workers(self, model: RegisteredModel) -> frozenset[int]:
        """Return the ids of the model's instances that should get no request now."""
        thresholds = self.thresholds.find(model.name)
        if not thresholds.are_set:
            return frozenset()
        return self.loads.select_busy(
            [instance.instance_id for instance in model.instances],
            thresholds,
            model.card.runtime_config.max_num_batched_tokens,
            self._clock.now(),
        )

    def tenant_of(self, client: exchange.Exchange) -> str:
        """Return the tenant of the client's API key; "" without keys. Raises Unauthenticated."""
        if self._key_file is None:
            return ""
        return self._key_file.api_keys.authenticate(client.request.headers).tenant

    def key_of(self, client: exchange.Exchange) -> api_keys.ApiKeyEntry | None:
        """Return the client's API key; None where no keys are used. Raises Unauthenticated."""
        if self._key_file is None:
            return None
        return self._key_file.api_keys.authenticate(client.request.headers).entry

    def headers_of(self, key_name: str | None) -> Mapping[str, str]:
        """Return the headers by which this process itself asks with the rights of an API key; none without keys."""
        if self._key_file is None or key_name is None:
            return {}
        return self._key_file.api_keys.headers_of(key_name)

    def has_valid_key(self, client: exchange.Exchange) -> bool:
        """Return whether the client's API key is valid; always true without keys."""
        try:
            self.tenant_of(client)
        except errors.Unauthenticated:
            return False
        return True

    def check_rights(
        self, client: exchange.Exchange, *, chooses_worker: bool, sets_priority: bool
    ) -> None:
        """Raise Forbidden if the client's API key may not do this; without keys every client may."""
        if self._key_file is not None and (chooses_worker or sets_priority):
            api_key = self._key_file.api_keys.authenticate(client.request.headers)
            api_key.check_rights(chooses_worker=chooses_worker, sets_priority=sets_priority)

    def cache_salt(
        self, client: exchange.Exchange, model: RegisteredModel, requested: str | None
    ) -> str | None:
        """Return the salt of a request's cached blocks: of its tenant, and of the salt that it asks for.

        None, for all that have none, without keys (or with a cache that tenants share) and without a salt of its own.
        Raises InvalidRequest for a requested salt that the model's engine cannot keep.
        """
        can_keep = model.card.runtime_config.supports_cache_salt
        if requested is not None and not can_keep:
            raise errors.InvalidRequest(
                f"cache_salt: the engine of {model.name!r} does not keep cached prefixes apart; leave it out",
                param="cache_salt",
            )
        is_shared = self._key_file is None or self._key_file.api_keys.shares_prefix_cache
        tenant = "" if is_shared else self.tenant_of(client)
        if tenant and not can_keep and model.name not in self._unsalted_models:
            self._unsalted_models.add(model.name)
            _logger.warning(
                "the engine of %r does not keep the cached prefixes of tenants apart: each can measure what others ask",
                model.name,
            )
        if not tenant and requested is None:
            return None
        return hashlib.sha256(f"{tenant}\0{requested or ''}".encode()).hexdigest()[:_SALT_CHARS]

    def may_see(self, client: exchange.Exchange, model: str) -> bool:
        """Return whether the client's API key allows this model. Raises Unauthenticated."""
        if self._key_file is None:
            return True
        return self._key_file.api_keys.authenticate(client.request.headers).allows_model(model)

    def check_may_see(self, client: exchange.Exchange, model: str) -> None:
        """Raise Forbidden if the client's API key does not allow this model."""
        if not self.may_see(client, model):
            raise errors.Forbidden(f"this key may not ask the model {model!r}")

    def _num_free_workers(self, name: str) -> int | None:
        """Count the model's workers that are not busy; None if no threshold is set or the model is gone."""
        if not self.thresholds.find(name).are_set:
            return None
        try:
            model = self._models.find(name)
        except errors.DynamoError:
            return None
        return len(model.instances) - len(self.busy_workers(model))

    def _charge(
        self, model: str, api_key: api_keys.ApiKey, num_tokens: int, client: exchange.Exchange
    ) -> None:
        """Charge the prompt to the key and its tenant. Raises Forbidden or RateLimited."""
        if not api_key.allows_model(model):
            raise errors.Forbidden(
                f"the key {api_key.entry.name!r} may not ask the model {model!r}"
            )
        now = self._clock.now()
        try:
            rate_limits.start_response(api_key.accounts, num_tokens, now)
        except errors.RateLimited:
            self._metrics.count_rejection(metrics.RejectionReason.KEY_LIMIT, model)
            raise
        finally:
            client.headers = rate_limits.limit_headers(api_key.accounts, now)

    def _on_thresholds_changed(self) -> None:
        if not self._is_monitoring_loads:
            self._is_monitoring_loads = True
            self._running.start("watch the workers' load", self._load_monitor.watch())
        self.is_active = True
        self.admit_waiting()


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
