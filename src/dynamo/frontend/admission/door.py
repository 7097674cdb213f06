"""The door: with API keys in use, every request shows one before anything else looks at it.

It stands around the whole router, so that a route that is added later is not open by mistake. What probes and scrapers
ask needs no key.
"""

from collections.abc import Awaitable, Callable

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend.admission import keys, limits, metrics
from dynamo.frontend.answer import delivery
from dynamo.runtime.http import exchange, router

OPEN = frozenset(("/live", "/health", "/metrics", "/v2/health/live", "/v2/health/ready"))
FOR_ADMINS = frozenset((("POST", "/busy_threshold"), ("POST", "/clear_kv_blocks")))
_NO_MODEL = "unknown"  # it is not read before the key


class Door:
    """A handler around another."""

    def __init__(
        self,
        handler: router.Handler,
        book: keys.GuestBook,
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
        if path not in OPEN:
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
            self._counts.rejected(metrics.Closed.API_KEY, _NO_MODEL)
            raise
        if (request.method, request.path) in FOR_ADMINS and not guest.entry.admin:
            raise errors.Forbidden(
                f"the key {guest.entry.name!r} is not an administrator's (admin = true), which {request.path} takes"
            )
        if request.method == "POST":
            self._take_request(caller, guest)

    def _take_request(self, caller: exchange.Exchange, guest: keys.Guest) -> None:
        now = self._clock.now()
        try:
            limits.take_request(guest.accounts, now)
        except errors.RateLimited:
            self._counts.rejected(metrics.Closed.KEY_LIMIT, _NO_MODEL)
            raise
        finally:
            caller.headers = limits.headers(guest.accounts, now)
