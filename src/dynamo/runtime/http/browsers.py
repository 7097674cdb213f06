"""Rules for requests that a browser sends, so that no foreign web page can drive this server.

A page of any site may send requests to a server on the same machine. A browser marks them with `Origin` (Fetch
standard) or `Sec-Fetch-Site` (Fetch Metadata). Such a request is refused if it comes from another origin that
`--cors-allow-origin` does not name, if its body is of a type that a page may send without asking first, or if its
`Host` is a name that is not ours: a page can have its own name resolve to our address (DNS rebinding). What a page
reads under its own name by plain HTTP has neither mark, but always `Accept-Language`, which a page can change and not
leave out. Requests that no browser sent, such as those of curl, probes and proxies, are not looked at.
"""

import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping

from dynamo.base import addresses, errors
from dynamo.runtime.http import exchange

_METHODS = "GET, POST, DELETE, OPTIONS"
_PREFLIGHT_AGE_S = 600  # how long a browser may remember the answer
_MAX_HEADER_NAMES = 1000  # characters of a preflight request's list of headers
_EXPOSED = (
    "x-request-id, request-id, retry-after, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-dynamo-ignored-parameters"
)
# The headers by which browsers are known. Node has the last one, too, and beside it `Sec-Fetch-Mode` alone.
_MARKS = frozenset(("origin", "sec-fetch-site", "accept-language"))
# Types that need a preflight request when another origin sends them: JSON, and the tensors of KServe.
_BODY_TYPES = ("application/json", "application/octet-stream")
_ORIGIN = re.compile(r"https?://[^/\s?#]+|null|\*").fullmatch
ORIGINS_HELP = (
    "origins, such as https://chat.example.com, whose web pages may send requests; * for all"
)
HOSTS_HELP = "names by which browsers reach this server, beside its host name and addresses"


class BrowserPolicy:
    """Decides on one request by its headers.

    `allowed_origins` are exact origins such as `https://chat.example.com`, or `*` for all; `allowed_hosts` are names
    under which this server is reached beside loopback names and addresses; None accepts every name.
    """

    def __init__(
        self, allowed_origins: frozenset[str], allowed_hosts: frozenset[str] | None
    ) -> None:
        self._allowed_origins = allowed_origins
        self._allowed_hosts = allowed_hosts

    def check(self, request: exchange.Request) -> None:
        """Raise Forbidden if a browser sent the request for a page that may not send it."""
        headers = request.headers
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None and site is None and not _is_unmarked_read(request):
            return
        host = headers.get("host", "").lower()
        self._check_host(host)
        is_allowed = origin is not None and self._allows(origin)
        own_origins = (f"http://{host}", f"https://{host}")
        if origin is not None and not is_allowed and origin.lower() not in own_origins:
            raise errors.Forbidden(
                f"expected a request of our own pages, got one of {origin[:200]!r}: "
                "allow it with --cors-allow-origin"
            )
        if site == "cross-site" and not is_allowed and not _is_visit(headers):
            raise errors.Forbidden(
                "expected a request of our own pages, got one of another site: "
                "allow its origin with --cors-allow-origin"
            )
        content_type = headers.get("content-type", "no type")
        if request.body and content_type.partition(";")[0].strip().lower() not in _BODY_TYPES:
            raise errors.Forbidden(
                "expected a body with the header Content-Type: application/json from a browser, "
                f"got {content_type[:100]!r}"
            )

    def cors_headers(self, request: exchange.Request) -> exchange.Headers:
        """Return the headers that let a page of an allowed origin read the answer; empty for others."""
        origin = request.headers.get("origin")
        if origin is None or not self._allows(origin):
            return ()
        return (
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", _EXPOSED),
            ("vary", "origin"),
        )

    def _allows(self, origin: str) -> bool:
        return origin in self._allowed_origins or "*" in self._allowed_origins

    def _check_host(self, host: str) -> None:
        is_bracketed = host.startswith("[")  # an address of IPv6
        name = host[1:].partition("]")[0] if is_bracketed else host.partition(":")[0]
        # an address cannot be the name of another host, and `localhost` is always loopback
        is_local = name == "localhost" or name.endswith(".localhost") or addresses.is_address(name)
        if self._allowed_hosts is None or name in self._allowed_hosts or is_local:
            return
        raise errors.Forbidden(
            f"expected a Host that names this server, got {host[:200]!r}: "
            "allow it with --allowed-hosts"
        )


class BrowserGuard:
    """A handler that answers preflight requests and passes on what the policy allows; `refuse` answers the rest."""

    def __init__(
        self,
        handler: exchange.Handler,
        policy: BrowserPolicy,
        refuse: Callable[[exchange.Exchange, errors.Forbidden], None],
    ) -> None:
        self._handler = handler
        self._policy = policy
        self._refuse = refuse

    def __call__(self, client: exchange.Exchange) -> Awaitable[None] | None:
        request = client.request
        if _MARKS.isdisjoint(request.headers):  # no browser sent it
            return self._handler(client)
        client.cors_headers = self._policy.cors_headers(request)
        try:
            self._policy.check(request)
        except errors.Forbidden as error:
            self._refuse(client, error)
            return None
        if client.cors_headers and is_preflight(request):
            asked_headers = request.headers.get("access-control-request-headers", "")
            permissions = [
                ("access-control-allow-methods", _METHODS),
                (
                    "access-control-allow-headers",
                    asked_headers[:_MAX_HEADER_NAMES] or "content-type",
                ),
                ("access-control-max-age", str(_PREFLIGHT_AGE_S)),
            ]
            if request.headers.get("access-control-request-private-network") == "true":
                permissions.append(("access-control-allow-private-network", "true"))
            client.respond(204, b"", headers=permissions)
            return None
        return self._handler(client)


def check_origins(origins: Iterable[str]) -> None:
    """Raise ConfigError for a value of `--cors-allow-origin` that is no origin."""
    for origin in origins:
        if not _ORIGIN(origin):
            raise errors.ConfigError(
                "--cors-allow-origin: expected an origin such as https://chat.example.com, null "
                f"or *, got {origin!r}"
            )


def is_preflight(request: exchange.Request) -> bool:
    """Return whether a browser asks for permission; it sends no key with that."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def own_names() -> frozenset[str]:
    """Return the names of this machine, as it knows them itself: a look-up in DNS could hold up the start."""
    name = socket.gethostname().lower()
    return frozenset((name, name.partition(".")[0]))


def _is_unmarked_read(request: exchange.Request) -> bool:
    """Return whether a browser may have sent a request without the marks of the standards: they are in all others."""
    headers, is_read = request.headers, request.method in ("GET", "HEAD")
    return is_read and "accept-language" in headers and "sec-fetch-mode" not in headers


def _is_visit(headers: Mapping[str, str]) -> bool:
    """Return whether a person followed a link to one of our pages; the page with the link cannot read it."""
    return (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and "origin" not in headers
    )
