"""The file of API keys: read at the start, and again when it has changed. A broken one changes nothing.

It is looked at once a second, which needs no watcher and follows every way to replace a file (write in place, rename,
a mounted secret whose link moves). SIGHUP looks at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import api_keys, metrics, rate_limits
from dynamo.frontend.answer import delivery
from dynamo.runtime.http import exchange, router

CHECK_INTERVAL_S = 1.0
_Stamp = tuple[int, int, int]
_logger = logging.getLogger(__name__)


class KeyFileWatcher:
    """Keeps `book` as the file says."""

    def __init__(self, path: Path, clock: clocks.Clock) -> None:
        self.book = api_keys.ApiKeyRegistry()
        self._path = path
        self._clock = clock
        self._stamp: _Stamp | None = None
        self.look_now = asyncio.Event()

    def load(self) -> None:
        """Take over what the file says now. Raises ConfigError, and then nothing has changed."""
        try:
            self._stamp = self._look()
            content = self._path.read_text("utf-8")
            self.book.replace(api_keys.parse_key_file(content), self._clock.now())
        except (OSError, UnicodeDecodeError, errors.ConfigError) as error:
            raise errors.ConfigError(f"--api-keys-file {self._path}: {error}") from None

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.look_now.wait(), CHECK_INTERVAL_S)
            if self.look_now.is_set() or self._has_changed():
                self.look_now.clear()
                self._reload()

    def _reload(self) -> None:
        try:
            self.load()
        except errors.ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)  # noqa: TRY400 (one line says it)
        else:
            _logger.info("read %d API keys from %s", len(self.book), self._path)

    def _has_changed(self) -> bool:
        try:
            return self._look() != self._stamp
        except OSError:  # while it is being replaced
            return False

    def _look(self) -> _Stamp:
        found = self._path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


OPEN_PATHS = frozenset(("/live", "/health", "/metrics", "/v2/health/live", "/v2/health/ready"))
ADMIN_ROUTES = frozenset((("POST", "/busy_threshold"), ("POST", "/clear_kv_blocks")))
_NO_MODEL = "unknown"  # it is not read before the key


class KeyAuthenticator:
    """A handler around another."""

    def __init__(
        self,
        handler: router.Handler,
        book: api_keys.ApiKeyRegistry,
        dialect_of: Callable[[str], delivery.Dialect],
        counts: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._handler = handler
        self._book = book
        self._dialect_of = dialect_of
        self._counts = counts
        self._clock = clock

    def __call__(self, caller: exchange.Exchange) -> Awaitable[None] | None:
        path = caller.request.path
        if path not in OPEN_PATHS:
            try:
                self._check(caller)
            except errors.RequestError as error:
                delivery.respond_error(caller, error, self._dialect_of(path))
                return None
        return self._handler(caller)

    def _check(self, caller: exchange.Exchange) -> None:
        """Raises Unauthenticated, Forbidden or RateLimited."""
        request = caller.request
        try:
            guest = self._book.identify(request.headers)
        except errors.Unauthenticated:
            self._counts.rejected(metrics.RejectionReason.API_KEY, _NO_MODEL)
            raise
        if (request.method, request.path) in ADMIN_ROUTES and not guest.entry.admin:
            raise errors.Forbidden(
                f"the key {guest.entry.name!r} is not an administrator's (admin = true), which {request.path} takes"
            )
        if request.method == "POST":
            self._take_request(caller, guest)

    def _take_request(self, caller: exchange.Exchange, guest: api_keys.ApiKey) -> None:
        now = self._clock.now()
        try:
            rate_limits.charge_request(guest.accounts, now)
        except errors.RateLimited:
            self._counts.rejected(metrics.RejectionReason.KEY_LIMIT, _NO_MODEL)
            raise
        finally:
            caller.headers = rate_limits.limit_headers(guest.accounts, now)
