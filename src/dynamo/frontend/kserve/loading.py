"""The gRPC server, if it is asked for; its library is an extra, and is loaded only then."""

import importlib
from typing import Protocol

from dynamo.base import errors
from dynamo.frontend import config, models, pipeline

_SERVER = "dynamo.frontend.kserve.server"


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


def build(
    settings: config.FrontendConfig, answers: pipeline.Pipeline, known: models.Models
) -> Server:
    """What these settings want. Raises ConfigError if it is not installed."""
    if not settings.kserve_grpc_server:
        return NoServer()
    try:
        module = importlib.import_module(_SERVER)
    except ModuleNotFoundError as error:
        raise errors.ConfigError(
            f"--kserve-grpc-server needs {error.name}, which is not installed: "
            "pip install 'pydynamo[kserve]'"
        ) from error
    tls = None
    if settings.tls_cert_path and settings.tls_key_path:
        tls = settings.tls_cert_path, settings.tls_key_path
    made: Server = module.GrpcServer(
        answers, known, max_message_bytes=settings.http_body_limit_mb * 2**20, tls=tls
    )
    return made
