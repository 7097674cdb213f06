"""The HTTP paths of a service: `POST /name` for each method with `@api`, and `GET /health`."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.runtime.http import exchange, server

_TEXT = "text/plain; charset=utf-8"
_STATUSES: tuple[tuple[type[errors.DynamoError], int], ...] = (
    (errors.RequestError, 400),
    (errors.Unavailable, 503),
)
Method = Callable[..., AsyncIterator[Any]]


def make_server(methods: Mapping[str, Method]) -> server.HttpServer:
    """Return the server of these methods, by the names of their paths."""
    table: dict[tuple[str, str], exchange.Handler] = {
        ("POST", f"/{name}"): _handler(method) for name, method in methods.items()
    }
    table["GET", "/health"] = lambda client: client.respond(200, b'{"status":"healthy"}')
    router = exchange.HttpRouter(table, error_body=server.plain_error)
    return server.HttpServer(router, error_body=server.plain_error)


def _handler(method: Method) -> exchange.Handler:
    async def handle(client: exchange.Exchange) -> None:
        headers = client.request.headers
        own = f"://{headers.get('host', '')}"
        if not headers.get("origin", own).endswith(own):
            _refuse(client, 403, "a page of another origin may not call this service")
            return
        try:
            await _stream(client, method)
        except (msgspec.DecodeError, TypeError) as error:
            _refuse(client, 400, f"expected a JSON object with the method's arguments: {error}")
        except errors.DynamoError as error:
            status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 500)
            _refuse(client, status, str(error))

    return handle


async def _stream(client: exchange.Exchange, method: Method) -> None:
    """Stream what the method yields for the body."""
    fields = msgspec.json.decode(client.request.body or b"{}", type=dict[str, Any])
    async for item in method(**fields):
        if not client.is_streaming:
            client.start_stream(200, content_type=_TEXT)
        client.write(item.encode() if isinstance(item, str) else msgspec.json.encode(item))
    if not client.is_streaming:
        client.start_stream(200, content_type=_TEXT)
    client.end()


def _refuse(client: exchange.Exchange, status: int, message: str) -> None:
    """Answer with an error; a stream that has begun says so in its last line."""
    if client.is_streaming:
        client.end(f"\nerror: {message}\n".encode())
    else:
        client.respond(status, server.plain_error(status, message, client.request.path))
