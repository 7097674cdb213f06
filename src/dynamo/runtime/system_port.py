"""The system port of a process of `dynamo_worker`: probes, metrics, and the commands that its service registers.

GET /live            200 as long as the event loop of the process runs
GET /health          200 while all endpoints that it waits for are ready, and it is not stopping; else 503
GET /metrics         the metrics of its endpoints, in Prometheus's format
GET, POST /engine/*  what `DistributedRuntime.register_engine_route` registered
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import addresses, errors
from dynamo.observability import metrics
from dynamo.protocols import wire
from dynamo.runtime import serving
from dynamo.runtime.http import browsers, exchange, server

EngineRoute = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
_ENGINE = "/engine/"
_log = logging.getLogger(__name__)
_decode_body = msgspec.json.Decoder(dict[str, Any]).decode


async def listen(served: server.HttpServer, host: str, ports: addresses.PortRange) -> int:
    """Let a server listen at the first free system port and return it; 0 is any. Raises ConfigError if none is free."""
    for port in range(ports.first, ports.last):
        with contextlib.suppress(errors.ConfigError):
            return await served.start(host, port)
    return await served.start(host, ports.last, port_flag="another DYN_SYSTEM_PORT")


class ServiceSystemPort:
    """Answers /live, /health, /metrics and the engine routes of a user's service on its system port."""

    def __init__(
        self,
        served: serving.ServedEndpoints,
        engine_routes: Mapping[str, EngineRoute],
        *,
        awaited: tuple[str, ...],
        is_stopping: Callable[[], bool],
    ) -> None:
        """`awaited` are the endpoints that /health waits for: none are all that are served, of which there is one."""
        self._served = served
        self._engine_routes = engine_routes
        self._awaited = awaited
        self._is_stopping = is_stopping
        routes: dict[tuple[str, str], exchange.Handler] = {
            ("GET", "/live"): lambda client: client.respond(200, self._status("ready")),
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): lambda client: client.respond(
                200, served.render(), content_type=metrics.CONTENT_TYPE
            ),
            ("GET", f"{_ENGINE}**"): self._command,
            ("POST", f"{_ENGINE}**"): self._command,
        }
        policy = browsers.BrowserPolicy(frozenset(), browsers.own_names())
        guard = browsers.BrowserGuard(
            exchange.HttpRouter(routes, error_body=server.plain_error),
            policy,
            lambda client, error: _refuse(client, 403, str(error)),
        )
        self._server = server.HttpServer(guard, error_body=server.plain_error)

    async def start(self, host: str, ports: addresses.PortRange) -> int:
        """Listen at the first free port and return it; 0 is any. Raises ConfigError if none is free."""
        return await listen(self._server, host, ports)

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await self._server.close()

    def _health(self, client: exchange.Exchange) -> None:
        states = self._served.states()
        awaited = self._awaited or states
        is_ready = all(states.get(name, False) for name in awaited) and bool(awaited)
        is_ready = is_ready and not self._is_stopping()
        client.respond(200 if is_ready else 503, self._status("ready" if is_ready else "notready"))

    def _status(self, status: str) -> bytes:
        seconds, fraction = divmod(self._served.uptime_s, 1)
        states = self._served.states().items()
        return msgspec.json.encode(
            {
                "status": status,
                "uptime": {"secs": int(seconds), "nanos": int(fraction * 1e9)},
                "endpoints": {name: "ready" if ready else "notready" for name, ready in states},
            }
        )

    async def _command(self, client: exchange.Exchange) -> None:
        name = client.request.path.removeprefix(_ENGINE)
        route = self._engine_routes.get(name)
        if route is None:
            registered = ", ".join(sorted(self._engine_routes)) or "none"
            _refuse(client, 404, f"no command {name!r} is registered; there are: {registered}")
            return
        try:
            body = _decode_body(client.request.body or b"{}")
        except wire.DECODE_ERRORS as error:
            _refuse(client, 400, f"expected a JSON object: {error}")
            return
        try:
            answer = msgspec.json.encode(await route(body))
        except errors.RequestError as error:
            _refuse(client, 400, str(error))
        except Exception as error:  # noqa: BLE001 (the supervisor of a user's command)
            _log.exception("the command /engine/%s failed", name)
            _refuse(client, 500, f"the command failed: {type(error).__name__}: {error}")
        else:
            client.respond(200, answer)


def _refuse(client: exchange.Exchange, status: int, message: str) -> None:
    client.respond(status, server.plain_error(status, message, client.request.path))
