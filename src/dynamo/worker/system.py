"""The worker's system port: whether it lives, whether it is ready, and what it counts.

GET /live       200 for as long as the process turns its event loop
GET /health     200 once the worker serves, 503 before, while it drains, and after its engine died
GET /metrics    Prometheus

What can be told to a worker beside that brings its own routes (`sleep_routes`, `lora_routes`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from dynamo.observability import metrics
from dynamo.runtime.http import exchange, router, server

PORT_DISABLED = -1


class SystemPort:
    """Answers for one worker. `is_ready` and `render` are asked at each request."""

    def __init__(
        self,
        *,
        endpoints: tuple[str, ...],
        is_ready: Callable[[], bool],
        uptime_s: Callable[[], float],
        render: Callable[[], bytes],
        beside: Mapping[tuple[str, str], router.Handler] = MappingProxyType({}),
    ) -> None:
        self._endpoints = endpoints
        self._is_ready = is_ready
        self._uptime_s = uptime_s
        self._render = render
        table = {
            ("GET", "/live"): self._live,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            **beside,
        }
        self._server = server.HttpServer(
            router.Router(table, error_body=server.plain_error), error_body=server.plain_error
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; gives the port. Raises ConfigError if it cannot."""
        return await self._server.start(host, port, port_flag="--system-port")

    async def close(self) -> None:
        """Stop listening."""
        await self._server.close()

    def _live(self, request: exchange.Exchange) -> None:
        request.respond(200, self._body())

    def _health(self, request: exchange.Exchange) -> None:
        request.respond(200 if self._is_ready() else 503, self._body())

    def _metrics(self, request: exchange.Exchange) -> None:
        request.respond(200, self._render(), content_type=metrics.CONTENT_TYPE)

    def _body(self) -> bytes:
        status = "ready" if self._is_ready() else "notready"
        whole, part = divmod(self._uptime_s(), 1)
        return msgspec.json.encode(
            {
                "status": status,
                "uptime": {"secs": int(whole), "nanos": int(part * 1e9)},
                "endpoints": dict.fromkeys(self._endpoints, status),
            }
        )
