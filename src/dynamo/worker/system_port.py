"""The system port of a worker: an HTTP server for its health, its metrics and the operator's commands.

GET /live       200 as long as the event loop of the process runs
GET /health     200 once the worker serves; 503 before, while it drains, while it sleeps and after its engine died
GET /metrics    the metrics, in Prometheus's format

Commands bring their own routes (`sleep`, `lora_adapters`) and answer through `respond`.
"""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import msgspec

from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange, server

PORT_DISABLED = -1
_STATUS_BY_ERROR: tuple[tuple[type[errors.DynamoError], int], ...] = (
    (model_errors.ModelNotFound, 404),  # before RequestError, of which it is one
    (errors.Conflict, 409),
    (errors.RequestError, 400),
    (errors.Unavailable, 503),
)


class SystemPort:
    """Serves the system port of one process; calls `is_ready`, `uptime_s` and `render` for each request."""

    def __init__(
        self,
        *,
        endpoints: tuple[str, ...],
        is_ready: Callable[[], bool],
        uptime_s: Callable[[], float],
        render: Callable[[], bytes],
        command_routes: Mapping[tuple[str, str], exchange.Handler] = MappingProxyType({}),
    ) -> None:
        self._endpoints = endpoints
        self._is_ready = is_ready
        self._uptime_s = uptime_s
        self._render = render
        table = {
            ("GET", "/live"): self._live,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            **command_routes,
        }
        self._server = server.HttpServer(
            exchange.HttpRouter(table, error_body=server.plain_error), error_body=server.plain_error
        )

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, which the system chooses for 0. Raises ConfigError if the port is taken."""
        return await self._server.start(host, port, port_flag="--system-port")

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await self._server.close()

    def _live(self, request: exchange.Exchange) -> None:
        request.respond(200, self._status_body())

    def _health(self, request: exchange.Exchange) -> None:
        request.respond(200 if self._is_ready() else 503, self._status_body())

    def _metrics(self, request: exchange.Exchange) -> None:
        request.respond(200, self._render(), content_type=metrics.CONTENT_TYPE)

    def _status_body(self) -> bytes:
        status = "ready" if self._is_ready() else "notready"
        seconds, fraction = divmod(self._uptime_s(), 1)
        return msgspec.json.encode(
            {
                "status": status,
                "uptime": {"secs": int(seconds), "nanos": int(fraction * 1e9)},
                "endpoints": dict.fromkeys(self._endpoints, status),
            }
        )


async def respond(request: exchange.Exchange, command: Awaitable[Mapping[str, object]]) -> None:
    """Await a command and answer with its result as JSON, or with the status of the error that it raised.

    400 names the field that is wrong, 404 a name that does not exist, 409 says that the worker's state forbids it now.
    """
    try:
        result = await command
    except errors.DynamoError as error:
        status = next((code for kind, code in _STATUS_BY_ERROR if isinstance(error, kind)), 500)
        request.respond(status, server.plain_error(status, str(error), request.request.path))
    else:
        request.respond(200, msgspec.json.encode(result))
