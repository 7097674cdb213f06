"""Admission as the settings want it: made here, started here, and only as much of it as is used."""

import ipaddress
import logging
from collections.abc import Callable
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import tasks
from dynamo.frontend import config
from dynamo.frontend.admission import busy, desk, door, gate, key_file, load_watch, metrics
from dynamo.frontend.answer import delivery
from dynamo.frontend.catalog import models
from dynamo.observability import metrics as observed
from dynamo.runtime import events
from dynamo.runtime.http import router

_logger = logging.getLogger(__name__)


class Control:
    """`apply` is called once requests are to go past the desk: at the start, or when thresholds are set later."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        known: models.Models,
        plane: events.EventPlane,
        registry: observed.Registry,
        clock: clocks.Clock,
        apply: Callable[[desk.Desk], None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._apply = apply
        self._running: tasks.Tasks | None = None
        self._is_watching_loads = False
        self._counts = metrics.AdmissionMetrics(registry)
        path = settings.api_keys_file
        self._keys = key_file.KeyWatch(Path(path), clock) if path else None
        book = self._keys.book if self._keys else None
        self.desk = desk.Desk(
            known, _rules(settings), _thresholds(settings), book, self._counts, clock
        )
        self.desk.thresholds.on_change = self._thresholds_changed
        self._load_watch = load_watch.LoadWatch(
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
        return door.Door(handler, self._keys.book, dialect_of, self._counts, self._clock)

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


def _rules(settings: config.FrontendConfig) -> gate.Rules:
    return gate.Rules(
        concurrency_limit=settings.rejection_frontend_request_concurrency_limit,
        queue_limit=settings.queue_limit,
        queue_timeout_s=settings.queue_timeout_secs,
    )


def _thresholds(settings: config.FrontendConfig) -> busy.Thresholds:
    return busy.Thresholds(
        active_decode_blocks_threshold=settings.active_decode_blocks_threshold,
        active_prefill_tokens_threshold=settings.active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac=settings.active_prefill_tokens_threshold_frac,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
