"""API keys at work: the key file, which is read again when it changes, and what the keys of clients allow.

The file is looked at once a second, which needs no watcher and follows every way to replace a file (write in place,
rename, a mounted secret behind a link that moves); SIGHUP looks at once. A file with an error changes nothing.

The check stands around the whole router, so that a route that is added later is not open by mistake. Probes and
scrapers need no key.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import get_args

from dynamo.base import clock as clocks
from dynamo.base import errors, membership, tasks
from dynamo.frontend import config
from dynamo.frontend.admission import api_keys, metrics, rate_limits
from dynamo.frontend.delivery import delivery
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import instances
from dynamo.runtime.http import exchange, parser

CHECK_INTERVAL_S = 1.0
# probes, scrapers, and the files of the console, which a browser needs before a person can give it a key
OPEN_PATHS = frozenset(
    (
        *("/live", "/ping", "/health", "/metrics", "/v2/health/live", "/v2/health/ready"),
        *("/", "/console", "/console/app.js", "/console/app.css", "/console/icon.svg"),
    )
)
ADMIN_ROUTES = frozenset(
    (
        *(("POST", "/busy_threshold"), ("POST", "/clear_kv_blocks")),
        *(("POST", f"/models/{action}") for action in get_args(instances.ModelAction)),
    )
)
_NO_MODEL = "unknown"  # the body is not read before the key is checked
_SALT_CHARS = 32  # of a hash: 128 bits
_FileStamp = tuple[int, int, int]  # inode, size, time of change
_logger = logging.getLogger(__name__)


class KeyFileWatcher:
    """Keeps `api_keys` equal to what the file says."""

    def __init__(self, path: Path, clock: clocks.Clock) -> None:
        self.api_keys = api_keys.ApiKeyRegistry()
        self._path = path
        self._clock = clock
        self._stamp: _FileStamp | None = None
        self._num_missing = 0  # checks in a row that found no file
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
            stamp = self._read_stamp()
        except OSError:  # once while it is being replaced; the second time it is said
            self._num_missing += 1
            return self._num_missing == 2
        self._num_missing = 0
        return stamp != self._stamp

    def _read_stamp(self) -> _FileStamp:
        status = self._path.stat()
        return status.st_ino, status.st_size, status.st_ctime_ns


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
            client.headers = rate_limits.with_limit_headers(client.headers, api_key.accounts, now)

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


class ClientRights:
    """What clients may do by their API keys; without a key file all of them may do everything."""

    def __init__(
        self,
        settings: config.FrontendConfig,
        admission_metrics: metrics.AdmissionMetrics,
        clock: clocks.Clock,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
    ) -> None:
        self._host = settings.http_host
        self._metrics = admission_metrics
        self._clock = clock
        self._key_file = (
            KeyFileWatcher(Path(settings.api_keys_file), clock) if settings.api_keys_file else None
        )
        self.uses_keys = self._key_file is not None  # whether clients need an API key
        self._unsalted_models: set[str] = set()  # that were warned about
        # of all frontends, and not of clients; a local token ends with its directory, and caches on disks do not
        has_secret = credentials.has_cluster_token
        self._salt_key = credentials.derive_keys("cache salts")[0] if has_secret else b""

    @property
    def accounts(self) -> Mapping[str, rate_limits.RateAccount]:
        """Return the accounts of all keys and tenants, by name; none without keys."""
        return {} if self._key_file is None else self._key_file.api_keys.accounts

    def load_keys(self) -> None:
        """Read the file of API keys for the first time, before the frontend listens. Raises ConfigError."""
        if self._key_file is not None:
            self._key_file.load()

    def reload_keys(self) -> None:
        """Have the file of API keys read again at once."""
        if self._key_file is not None:
            self._key_file.check_now.set()

    def start(self, running: tasks.Tasks) -> None:
        """Begin to follow the key file in a task of `running`, or warn that there is none."""
        if self._key_file is not None:
            running.start("watch the API keys", self._key_file.watch())
        elif not membership.is_loopback(self._host):
            _logger.warning(
                "listening on %s without API keys: every client that reaches it may use it (--api-keys-file)",
                self._host,
            )

    def make_authenticator(
        self, handler: exchange.Handler, dialect_of: Callable[[str], delivery.ErrorDialect]
    ) -> KeyAuthenticator | None:
        """Return a handler that authenticates requests before `handler` gets them; None if API keys are not used."""
        if self._key_file is None:
            return None
        return KeyAuthenticator(
            handler, self._key_file.api_keys, dialect_of, self._metrics, self._clock
        )

    def api_key_of(self, client: exchange.Exchange) -> api_keys.ApiKey | None:
        """Return the client's API key with its accounts; None without keys. Raises Unauthenticated."""
        if self._key_file is None:
            return None
        return self._key_file.api_keys.authenticate(client.request.headers)

    def key_name_of(self, client: exchange.Exchange) -> str | None:
        """Return the name of the client's API key; None without keys. Raises Unauthenticated."""
        api_key = self.api_key_of(client)
        return None if api_key is None else api_key.entry.name

    def tenant_of(self, client: exchange.Exchange) -> str:
        """Return the tenant of the client's API key; "" without keys. Raises Unauthenticated."""
        api_key = self.api_key_of(client)
        return "" if api_key is None else api_key.tenant

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
        if (chooses_worker or sets_priority) and (api_key := self.api_key_of(client)) is not None:
            api_key.check_rights(chooses_worker=chooses_worker, sets_priority=sets_priority)

    def cache_salt(
        self, client: exchange.Exchange, model: RegisteredModel, requested: str | None
    ) -> str | None:
        """Return the salt of a request's cached blocks: of its tenant, and of the salt that it asks for.

        None, for all that have none, without keys (or with a cache that tenants share) and without a salt of its own.
        It depends on the cluster token, so that who does not have that cannot look for a prompt whose blocks have the
        hashes of another tenant's: hashes of 64 bits are no proof against that.
        Raises InvalidRequest for a requested salt that the model's engine cannot keep.
        """
        can_keep = model.card.runtime_config.supports_cache_salt
        if requested is not None and not can_keep:
            raise errors.InvalidRequest.of_param(
                "cache_salt",
                f"the engine of {model.name!r} does not keep cached prefixes apart; leave it out",
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
        text = f"{tenant}\0{requested or ''}".encode()
        return hmac.digest(self._salt_key, text, "sha256").hex()[:_SALT_CHARS]

    def may_see(self, client: exchange.Exchange, model: str) -> bool:
        """Return whether the client's API key allows this model. Raises Unauthenticated."""
        api_key = self.api_key_of(client)
        return api_key is None or api_key.allows_model(model)

    def model_filter(self, client: exchange.Exchange) -> Callable[[str], bool] | None:
        """Return what tells whether the client's API key allows a model; None: all. Raises Unauthenticated."""
        if self._key_file is None:
            return None
        api_key = self._key_file.api_keys.authenticate(client.request.headers)
        return None if api_key.entry.models is None else api_key.allows_model
