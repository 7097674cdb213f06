"""The gRPC server that Envoy calls: one stream of messages for each HTTP request; and the checks of its health."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from dynamo.base import addresses, errors
from dynamo.gateway import ext_proc_pb2, processor

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"  # the published name
HEALTH = "grpc.health.v1.Health"  # likewise: Kubernetes, Envoy and gateways ask it
_SERVING = b"\x08\x01"  # its answer of one field, as protobuf encodes it
MAX_CALLS = 10_000
_ENVELOPE_BYTES = 2**20  # of a message around its body
_logger = logging.getLogger(__name__)
ReadCertificates = Callable[[], tuple[bytes, bytes] | None]  # the key and the certificates


def read_certificates(*, is_secure: bool, directory: str | None) -> tuple[bytes, bytes] | None:
    """Return the key and the certificates for TLS, if it is to be spoken. Raises ConfigError."""
    if not is_secure:
        return None
    if directory is None:
        raise errors.ConfigError(
            "--secure: expected --cert-path, the directory of tls.crt and tls.key"
        )
    try:
        key, chain = [(Path(directory) / name).read_bytes() for name in ("tls.key", "tls.crt")]
    except OSError as error:
        raise errors.ConfigError(
            f"--cert-path {directory}: expected tls.crt and tls.key in it: {error}"
        ) from error
    return key, chain


def _make_credentials(served: tuple[bytes, bytes], read: ReadCertificates) -> Any:
    """Return credentials that follow the files; gRPC keeps the former while a key and a certificate do not fit."""

    def fetch() -> Any:
        nonlocal served
        with contextlib.suppress(errors.ConfigError):
            latest = read()
            if latest is not None and latest != served:
                served = latest
                return grpc.ssl_server_certificate_configuration([served])
        return None

    first = grpc.ssl_server_certificate_configuration([served])
    return grpc.dynamic_ssl_server_credentials(first, fetch)


class ExtProcServer:
    """Serves Envoy's external processing until stopped."""

    def __init__(
        self, make_processor: Callable[[], processor.StreamProcessor], max_body_bytes: int
    ) -> None:
        self._make_processor = make_processor
        self._max_body_bytes = max_body_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, read: ReadCertificates = lambda: None) -> int:
        """Listen and return the port, which the system chooses for 0. Raises ConfigError.

        `read` returns what `read_certificates` does, and is called as each client connects: files are renewed.
        """
        certificates = read()
        size = self._max_body_bytes + _ENVELOPE_BYTES
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ext_proc_pb2.ProcessingRequest.FromString,
            response_serializer=ext_proc_pb2.ProcessingResponse.SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(_check_health)
        handlers = (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": method}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        )
        server.add_generic_rpc_handlers(handlers)
        address = addresses.join(host, port)
        try:
            if certificates is None:
                bound_port = server.add_insecure_port(address)
            else:
                credentials = _make_credentials(certificates, read)
                bound_port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise errors.ConfigError(f"--port: cannot listen on {address}: {error}") from error
        await server.start()
        self._server = server
        _logger.info("external processing: listening on %s:%d", host, bound_port)
        return int(bound_port)

    async def stop(self, grace_s: float) -> None:
        """Refuse new streams, let running ones finish within `grace_s` seconds, and end."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _process(self, requests: AsyncIterator[Any], context: Any) -> None:
        stream = self._make_processor()
        async for message in requests:
            for answer in await stream.process(message):
                await context.write(answer)


async def _check_health(_: bytes, context: Any) -> bytes:
    """Answer that each service is serving: a process that stops refuses the call."""
    del context
    return _SERVING
