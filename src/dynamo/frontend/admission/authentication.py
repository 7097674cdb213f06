"""Authentication by API key: the key file, which is read again when it changes, and the check of every request.

The file is looked at once a second, which needs no watcher and follows every way to replace a file (write in place,
rename, a mounted secret behind a link that moves); SIGHUP looks at once. A file with an error changes nothing.

The check stands around the whole router, so that a route that is added later is not open by mistake. Probes and
scrapers need no key.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from dynamo.base import clock as clocks
from dynamo.base import errors, membership
from dynamo.frontend.admission import api_keys, metrics, rate_limits
from dynamo.frontend.delivery import delivery
from dynamo.runtime.http import exchange, parser

CHECK_INTERVAL_S = 1.0
# probes, scrapers, and the files of the console, which a browser needs before a person can give it a key
OPEN_PATHS = frozenset(
    (
        *("/live", "/health", "/metrics", "/v2/health/live", "/v2/health/ready"),
        *("/", "/console", "/console/app.js", "/console/app.css", "/console/icon.svg"),
    )
)
ADMIN_ROUTES = frozenset((("POST", "/busy_threshold"), ("POST", "/clear_kv_blocks")))
_NO_MODEL = "unknown"  # the body is not read before the key is checked
_FileStamp = tuple[int, int, int]  # inode, size, time of change
_logger = logging.getLogger(__name__)


class KeyFileWatcher:
    """Keeps `api_keys` equal to what the file says."""

    def __init__(self, path: Path, clock: clocks.Clock) -> None:
        self.api_keys = api_keys.ApiKeyRegistry()
        self._path = path
        self._clock = clock
        self._stamp: _FileStamp | None = None
        self.check_now = asyncio.Event()

    def load(self) -> None:
        """Replace the keys by those in the file. Raises ConfigError and then keeps the keys as they are."""
        try:
            self._stamp = self._read_stamp()
            content = self._path.read_text("utf-8")
            self.api_keys.replace_keys(api_keys.parse_key_file(content), self._clock.now())
        except (OSError, UnicodeDecodeError, errors.ConfigError) as error:
            raise errors.ConfigError(f"--api-keys-file {self._path}: {error}") from None

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(CHECK_INTERVAL_S):
                    await self.check_now.wait()
            if self.check_now.is_set() or self._has_changed():
                self.check_now.clear()
                self._reload()

    def _reload(self) -> None:
        try:
            self.load()
        except errors.ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)  # noqa: TRY400 (one line says it)
        else:
            _logger.info("read %d API keys from %s", len(self.api_keys), self._path)

    def _has_changed(self) -> bool:
        try:
            return self._read_stamp() != self._stamp
        except OSError:  # while it is being replaced
            return False

    def _read_stamp(self) -> _FileStamp:
        status = self._path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns


class LocalAdministration:
    """A handler for servers without API keys: routes that concern all clients are taken from this machine only."""

    def __init__(
        self, handler: exchange.Handler, dialect_of: Callable[[str], delivery.ErrorDialect]
    ) -> None:
        self._handler = handler
        self._dialect_of = dialect_of

    def __call__(self, client: exchange.Exchange) -> Awaitable[None] | None:
        request = client.request
        if (request.method, request.path) in ADMIN_ROUTES and not membership.is_loopback(
            request.peer.rpartition(":")[0]
        ):
            error = errors.Forbidden(
                f"expected {request.path} from this machine, got it from {request.peer}: ask here, "
                "or use an administrator's API key (--api-keys-file)"
            )
            delivery.respond_error(client, error, self._dialect_of(request.path))
            return None
        return self._handler(client)


class KeyAuthenticator:
    """A handler that passes a request on to another handler if its API key is valid."""

    def __init__(
        self,
        handler: exchange.Handler,
        valid_keys: api_keys.ApiKeyRegistry,
        dialect_of: Callable[[str], delivery.ErrorDialect],
        admission_metrics: metrics.AdmissionMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._handler = handler
        self._api_keys = valid_keys
        self._dialect_of = dialect_of
        self._metrics = admission_metrics
        self._clock = clock

    def __call__(self, client: exchange.Exchange) -> Awaitable[None] | None:
        path = client.request.path
        if path not in OPEN_PATHS:
            try:
                self._check(client)
            except errors.RequestError as error:
                delivery.respond_error(client, error, self._dialect_of(path))
                return None
        return self._handler(client)

    def check_head(self, request: exchange.Request) -> None:
        """Refuse a request without a valid key before its body has come. Raises RequestRefused."""
        if request.path in OPEN_PATHS:
            return
        try:
            self._authenticate(request)
        except errors.RequestError as error:
            dialect = self._dialect_of(request.path)
            raise parser.RequestRefused(
                dialect.status_of(error), str(error), body=dialect.body_of(error)
            ) from error

    def _check(self, client: exchange.Exchange) -> None:
        """Raise Unauthenticated, Forbidden or RateLimited if the key does not allow the request."""
        request = client.request
        api_key = self._authenticate(request)
        if request.method != "POST":
            return
        now = self._clock.now()
        try:
            rate_limits.charge_request(api_key.accounts, now)
        except errors.RateLimited:
            self._metrics.count_rejection(metrics.RejectionReason.KEY_LIMIT, _NO_MODEL)
            raise
        finally:
            client.headers = rate_limits.limit_headers(api_key.accounts, now)

    def _authenticate(self, request: exchange.Request) -> api_keys.ApiKey:
        """Return the key of a request. Raises Unauthenticated or Forbidden."""
        try:
            api_key = self._api_keys.authenticate(request.headers)
        except errors.Unauthenticated:
            self._metrics.count_rejection(metrics.RejectionReason.API_KEY, _NO_MODEL)
            raise
        if (request.method, request.path) in ADMIN_ROUTES and not api_key.entry.admin:
            raise errors.Forbidden(
                f"the key {api_key.entry.name!r} is not an administrator's (admin = true), which {request.path} takes"
            )
        return api_key
