"""The gRPC server where it is switched on: its library is an extra, and is imported only then."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dynamo.base import distribution, errors
from dynamo.frontend import config
from dynamo.runtime.http import exchange, parser

T = TypeVar("T")
_SERVER = "dynamo.frontend.apis.kserve.grpc_server"


class KserveServer(Protocol):
    """A server that starts and stops."""

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port. Raises ConfigError."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let running calls finish within `grace_s` seconds, and end. Idempotent."""
        ...


class DisabledServer:
    """Takes the place of the server where it is switched off."""

    async def start(self, host: str, port: int) -> int:
        """Return port 0 without listening."""
        del host, port
        return 0

    async def stop(self, grace_s: float) -> None:
        """Do nothing."""


def make_server(
    settings: config.FrontendConfig, handler: exchange.Handler, check_head: parser.CheckHead
) -> KserveServer:
    """Return the server for these settings; `check_head` refuses a call before its message has come.

    Raises ConfigError if its library or a certificate is missing.
    """
    if not settings.kserve_grpc_server:
        return DisabledServer()
    module = distribution.load_extra(_SERVER, feature="--kserve-grpc-server", extra="kserve")
    server: KserveServer = module.GrpcServer(
        handler,
        check_head=check_head,
        max_message_bytes=settings.http_body_limit_mb * 2**20,
        read_tls=_tls_reader(settings, module.GrpcTls),
        shares_port=settings.http_worker_socket is not None,
    )
    return server


def _tls_reader(settings: config.FrontendConfig, make: Callable[..., T]) -> Callable[[], T] | None:
    """Return what reads the certificates of the HTTP server, and raises ConfigError if they cannot be read."""
    if settings.tls_cert_path is None:
        return None
    chain, key, authority = (
        settings.tls_cert_path,
        settings.tls_key_path,
        settings.tls_client_ca_cert_path,
    )
    assert key is not None  # `settings.check` saw to it
    return lambda: make(
        chain=_read(chain),
        key=_read(key),
        client_authority=_read(authority) if authority else None,
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.ConfigError(f"{path}: expected a readable PEM file: {error}") from error
