"""What the pipeline asks before it gives a request to workers, and what follows from the settings.

`Desk.admit` is the way in: the key's model, tokens and answers at the same time, then the model's gate. What it takes
it gives back when the request's meter says that the request is over, however it ended.
"""

import ipaddress
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
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
from dynamo.frontend.answer import delivery
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import metrics as observed
from dynamo.protocols import embed, generate
from dynamo.runtime import events
from dynamo.runtime.http import exchange, router


class Desk:
    """One for a frontend. `book` is None if nobody needs a key."""

    def __init__(
        self,
        known: registry.ModelRegistry,
        rules: permits.AdmissionPolicy,
        at_start: busy_workers.BusyThresholds,
        book: api_keys.ApiKeyRegistry | None,
        counts: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._models = known
        self.loads = busy_workers.WorkerLoads()
        self.thresholds = load_thresholds.ThresholdRegistry(known, at_start)
        self._rules = rules
        self._book = book
        self._counts = counts
        self._clock = clock
        self._gates: dict[str, permits.ModelPermits] = {}
        if rules.concurrency_limit is not None:
            counts.show_limit(metrics.RejectionReason.REQUEST_CONCURRENCY, rules.concurrency_limit)

    async def admit(
        self,
        model: RegisteredModel,
        prompts: Sequence[generate.Request | embed.EmbeddingRequest],
        caller: exchange.Exchange,
        meter: frontend_metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Return when the request may go to a worker. Raises Forbidden, RateLimited, Overloaded or Cancelled."""
        num_tokens = sum(one.prompt_len for one in prompts)
        stay = _Stay(self._clock.now)
        meter.on_end = stay.end
        if self._book is not None:
            guest = self._book.identify(caller.request.headers)
            self._charge(model.name, guest, num_tokens, caller)
            stay.accounts, stay.num_prompt_tokens = guest.accounts, num_tokens
        entry = self._gate(model)
        try:
            await entry.enter(
                caller,
                priority=max(one.priority for one in prompts),
                num_tokens=num_tokens,
                ignores_load=instance_id is not None,
            )
        except errors.Cancelled:
            meter.disconnected()
            raise
        stay.leave = entry.leave

    def busy_workers(self, model: RegisteredModel) -> frozenset[int]:
        """Instances of the model that should get nothing now."""
        limits_of_model = self.thresholds.of(model.name)
        if not limits_of_model.are_set:
            return frozenset()
        return self.loads.busy_among(
            [one.instance_id for one in model.instances],
            limits_of_model,
            model.card.runtime_config.max_num_batched_tokens,
            self._clock.now(),
        )

    def look(self) -> None:
        """Something changed: let in for whom there is room now."""
        for one in self._gates.values():
            one.look()

    def _gate(self, model: RegisteredModel) -> permits.ModelPermits:
        if model.name not in self._gates:
            self._gates[model.name] = permits.ModelPermits(
                model.name, self._rules, self._num_free(model.name), self._counts, self._clock
            )
        return self._gates[model.name]

    def may_see(self, caller: exchange.Exchange, model: str) -> bool:
        """Is this model one of the caller's?"""
        return self._book is None or self._book.identify(caller.request.headers).may_ask(model)

    def check_may_see(self, caller: exchange.Exchange, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_see(caller, model):
            raise errors.Forbidden(f"this key may not ask the model {model!r}")

    def _num_free(self, name: str) -> Callable[[], int | None]:
        """How many workers of this model are not busy; None: nobody can be, or nobody is there to ask."""

        def count() -> int | None:
            if not self.thresholds.of(name).are_set:
                return None
            try:
                model = self._models.find(name)
            except errors.DynamoError:
                return None
            return len(model.instances) - len(self.busy_workers(model))

        return count

    def _charge(
        self, model: str, guest: api_keys.ApiKey, num_tokens: int, caller: exchange.Exchange
    ) -> None:
        """What the key may, and what it costs."""
        if not guest.may_ask(model):
            raise errors.Forbidden(f"the key {guest.entry.name!r} may not ask the model {model!r}")
        now = self._clock.now()
        try:
            rate_limits.start_response(guest.accounts, num_tokens, now)
        except errors.RateLimited:
            self._counts.rejected(metrics.RejectionReason.KEY_LIMIT, model)
            raise
        finally:
            caller.headers = rate_limits.limit_headers(guest.accounts, now)


class _Stay:
    """What one request holds until it ends."""

    __slots__ = ("_now", "accounts", "leave", "num_prompt_tokens")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.accounts: tuple[rate_limits.RateAccount, ...] = ()
        self.num_prompt_tokens = 0
        self.leave: Callable[[], None] | None = None

    def end(self, num_output_tokens: int) -> None:
        """The meter's last word. Who never came in gets the tokens of the prompt back."""
        if self.leave is not None:
            self.leave()
            rate_limits.finish_response(self.accounts, num_output_tokens, self._now())
        else:
            rate_limits.finish_response(self.accounts, -self.num_prompt_tokens, self._now())


_logger = logging.getLogger(__name__)


class Control:
    """`apply` is called once requests are to go past the desk: at the start, or when thresholds are set later."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        known: registry.ModelRegistry,
        plane: events.EventPlane,
        registry: observed.Registry,
        clock: clocks.Clock,
        apply: Callable[[Desk], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._apply = apply
        self._running: tasks.Tasks | None = None
        self._is_watching_loads = False
        self._counts = metrics.AdmissionMetrics(registry)
        path = settings.api_keys_file
        self._keys = authentication.KeyFileWatcher(Path(path), clock) if path else None
        book = self._keys.book if self._keys else None
        self.desk = Desk(known, _rules(settings), _thresholds(settings), book, self._counts, clock)
        self.desk.thresholds.on_change = self._thresholds_changed
        self._load_watch = load_thresholds.LoadMonitor(
            plane, known, self.desk.loads, self.desk.look, clock
        )

    def load(self) -> None:
        """Read the keys, before anybody can come. Raises ConfigError."""
        if self._keys is not None:
            self._keys.load()

    def start(self, running: tasks.Tasks) -> None:
        """Follow what is to be followed."""
        self._running = running
        settings = self._settings
        if self._keys is not None:
            running.start("watch the API keys", self._keys.run())
        elif not _is_loopback(settings.http_host):
            _logger.warning(
                "listening on %s without API keys: whoever reaches it may use it (--api-keys-file)",
                settings.http_host,
            )
        if _thresholds(settings).are_set:
            self._watch_loads(running)
        if self._is_needed:
            self._apply(self.desk)

    def around(
        self, handler: router.Handler, dialect_of: Callable[[str], delivery.Dialect]
    ) -> router.Handler:
        """The handler behind a door, if keys are needed."""
        if self._keys is None:
            return handler
        return authentication.KeyAuthenticator(
            handler, self._keys.book, dialect_of, self._counts, self._clock
        )

    def reload_keys(self) -> None:
        """Look at their file now."""
        if self._keys is not None:
            self._keys.look_now.set()

    @property
    def _is_needed(self) -> bool:
        limit = self._settings.rejection_frontend_request_concurrency_limit
        return self._keys is not None or limit is not None or self._is_watching_loads

    def _thresholds_changed(self) -> None:
        if self._running is not None:
            self._watch_loads(self._running)
        self._apply(self.desk)
        self.desk.look()

    def _watch_loads(self, running: tasks.Tasks) -> None:
        if not self._is_watching_loads:
            self._is_watching_loads = True
            running.start("watch the workers' load", self._load_watch.run())


def _rules(settings: config.FrontendConfig) -> permits.AdmissionPolicy:
    return permits.AdmissionPolicy(
        concurrency_limit=settings.rejection_frontend_request_concurrency_limit,
        queue_limit=settings.queue_limit,
        queue_timeout_s=settings.queue_timeout_secs,
    )


def _thresholds(settings: config.FrontendConfig) -> busy_workers.BusyThresholds:
    return busy_workers.BusyThresholds(
        active_decode_blocks_threshold=settings.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=settings.active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac=settings.active_prefill_tokens_threshold_frac,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
