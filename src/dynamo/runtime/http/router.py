"""Which handler answers a request: by exact path, or by the longest prefix that ends in `/*`."""

from collections.abc import Awaitable, Callable, Mapping

from dynamo.runtime.http.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None] | None]
ErrorBody = Callable[[int, str, str], bytes]  # of a status, a message and the path that was asked


class Router:
    """A table of (method, path pattern) → handler. HEAD is answered by the handler of GET."""

    def __init__(self, table: Mapping[tuple[str, str], Handler], *, error_body: ErrorBody) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: dict[str, dict[str, Handler]] = {}
        self._error_body = error_body
        self.table = frozenset(table)
        for (method, pattern), handler in table.items():
            where = self._prefixes if pattern.endswith("/*") else self._exact
            where.setdefault(pattern.removesuffix("*"), {})[method] = handler

    def __call__(self, exchange: Exchange) -> Awaitable[None] | None:
        request = exchange.request
        handlers = self._exact.get(request.path) or self._by_prefix(request.path)
        if handlers is None:
            message = f"no such path: {request.method} {request.path}"
            exchange.respond(404, self._error_body(404, message, request.path))
            return None
        method = "GET" if request.method == "HEAD" else request.method
        handler = handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(handlers))
            message = f"{request.path} takes {allowed}, not {request.method}"
            body = self._error_body(405, message, request.path)
            exchange.respond(405, body, headers=(("allow", allowed),))
            return None
        return handler(exchange)

    def _by_prefix(self, path: str) -> dict[str, Handler] | None:
        matching = [prefix for prefix in self._prefixes if path.startswith(prefix)]
        return self._prefixes[max(matching, key=len)] if matching else None
