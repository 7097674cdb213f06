"""The gRPC server, if it is asked for; its library is an extra, and is loaded only then."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dynamo.base import distribution, errors
from dynamo.frontend import config
from dynamo.runtime.http import exchange

T = TypeVar("T")
_SERVER = "dynamo.frontend.apis.kserve.grpc_server"


class Server(Protocol):
    """A door that opens and closes."""

    async def start(self, host: str, port: int) -> int:
        """Listen; gives the port. Raises ConfigError."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let what runs finish, and end. Idempotent."""
        ...


class NoServer:
    """Nobody asked for one."""

    async def start(self, host: str, port: int) -> int:
        """Nothing listens: port 0."""
        del host, port
        return 0

    async def stop(self, grace_s: float) -> None:
        """Nothing runs."""


def build(settings: config.FrontendConfig, handler: exchange.Handler) -> Server:
    """What these settings want. Raises ConfigError if it is not installed, or cannot read a certificate."""
    if not settings.kserve_grpc_server:
        return NoServer()
    module = distribution.load_extra(_SERVER, feature="--kserve-grpc-server", extra="kserve")
    made: Server = module.GrpcServer(
        handler,
        max_message_bytes=settings.http_body_limit_mb * 2**20,
        tls=_tls(settings, module.Tls),
        shares_port=settings.http_worker_socket is not None,
    )
    return made


def _tls(settings: config.FrontendConfig, make: Callable[..., T]) -> T | None:
    """The same certificates as those of HTTP."""
    if settings.tls_cert_path is None:
        return None
    assert settings.tls_key_path is not None  # `settings.check` saw to it
    authority = settings.tls_client_ca_cert_path
    return make(
        chain=_read(settings.tls_cert_path),
        key=_read(settings.tls_key_path),
        client_authority=_read(authority) if authority else None,
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.ConfigError(f"{path}: expected a readable PEM file: {error}") from error
