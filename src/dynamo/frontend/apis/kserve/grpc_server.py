"""KServe's gRPC service, which answers through the same handler as the HTTP server.

It is imported only where it is switched on, because its library is an extra. No other module imports grpc.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from dynamo.base import addresses, errors
from dynamo.frontend.apis.kserve import inference, kserve_pb2, transcode
from dynamo.runtime.http import exchange, parser

SERVICE = "inference.GRPCInferenceService"  # the published name; see kserve.proto
MAX_CALLS = 10_000
MAX_PER_STREAM = 256  # requests of one ModelStreamInfer that are answered at once
_CODE_BY_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.INVALID_ARGUMENT,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_PROBES = ("ServerLive", "ServerReady")
_logger = logging.getLogger(__name__)
Method = Callable[[Any, Any], Awaitable[Any]]  # of a request and its context


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTls:
    """The contents of PEM files."""

    chain: bytes
    key: bytes
    client_authority: bytes | None  # that signs the certificates which clients must present


class GrpcServer:
    """Serves until stopped; `read_tls` is called as each client connects. Raises ConfigError as it does."""

    def __init__(
        self,
        handler: exchange.Handler,
        *,
        check_head: parser.CheckHead,
        max_message_bytes: int,
        read_tls: Callable[[], GrpcTls] | None,
        shares_port: bool,
    ) -> None:
        self._inference = inference.Inference(handler)
        self._check_head = check_head
        self._credentials = None if read_tls is None else _make_credentials(read_tls)
        self._options = [
            ("grpc.max_receive_message_length", min(max_message_bytes, 2**31 - 1)),
            ("grpc.so_reuseport", int(shares_port)),
        ]
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port, which the system chooses for 0. Raises ConfigError."""
        server = grpc.aio.server(
            interceptors=(_HeadInterceptor(self._check_head),),
            options=self._options,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        server.add_generic_rpc_handlers((self._handlers(),))
        address = addresses.join(host, port)
        try:
            bound_port = _add_port(server, address, self._credentials)
        except RuntimeError as error:
            raise errors.ConfigError(
                f"--kserve-grpc-port: cannot listen on {address}: {error}"
            ) from error
        await server.start()
        self._server = server
        _logger.info("KServe gRPC: listening on %s:%d", host, bound_port)
        return bound_port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running calls finish within `grace_s` seconds, and end. Idempotent."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _handlers(self) -> grpc.GenericRpcHandler:
        """Return the methods of the service by name."""
        # of methods whose answer is that of an HTTP route
        paths: dict[str, Callable[[Any], str]] = {
            "ServerLive": lambda _: "/v2/health/live",
            "ServerReady": lambda _: "/v2/health/ready",
            "ServerMetadata": lambda _: "/v2",
            "ModelMetadata": lambda request: inference.model_path(request.name, request.version),
        }
        methods = {name: _unary(name, self._make_get(name, path)) for name, path in paths.items()}
        methods["ModelReady"] = _unary("ModelReady", self._model_ready)
        methods["ModelConfig"] = _unary("ModelConfig", self._model_config)
        methods["ModelInfer"] = _unary("ModelInfer", self._model_infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            request_deserializer=kserve_pb2.ModelInferRequest.FromString,
            response_serializer=kserve_pb2.ModelStreamInferResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _make_get(self, name: str, path_of: Callable[[Any], str]) -> Method:
        async def method(request: Any, context: Any) -> Any:
            async with _aborting(context):
                answer = await self._inference.get(path_of(request), *_headers_and_peer(context))
                return _message_class(f"{name}Response")(**answer)

        return method

    async def _model_ready(self, request: Any, context: Any) -> Any:
        """Answer whether a model is ready; an unknown model is not, which is no error."""
        path = inference.model_path(request.name, request.version) + "/ready"
        is_ready = False
        async with _aborting(context, ignored_statuses=(400, 404, 503)):
            answer = await self._inference.get(path, *_headers_and_peer(context))
            is_ready = answer["ready"]
        return kserve_pb2.ModelReadyResponse(ready=is_ready)

    async def _model_config(self, request: Any, context: Any) -> Any:
        path = inference.model_path(request.name, request.version) + "/config"
        async with _aborting(context):
            config = await self._inference.get(path, *_headers_and_peer(context))
            return kserve_pb2.ModelConfigResponse(config=config)

    async def _model_infer(self, request: Any, context: Any) -> Any:
        """Answer one request by one message."""
        async with _aborting(context):
            pieces = self._inference.infer(request, *_headers_and_peer(context), can_stream=False)
            (whole,) = [piece async for piece in pieces]
            return transcode.make_response(whole, is_raw=bool(request.raw_input_contents))

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Answer any number of requests as they come, each by one or more messages."""
        write_lock = asyncio.Lock()
        slots = asyncio.Semaphore(MAX_PER_STREAM)

        async def write_answer(request: Any) -> None:
            async with contextlib.aclosing(self._stream_answer(request, context)) as messages:
                try:
                    async for message in messages:
                        async with write_lock:
                            await context.write(message)
                except grpc.aio.BaseError as error:
                    _logger.debug("the client left while a message was written: %r", error)
                finally:
                    slots.release()

        async with asyncio.TaskGroup() as answering:
            async for request in requests:
                await slots.acquire()
                answering.create_task(write_answer(request))

    async def _stream_answer(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        is_raw = bool(request.raw_input_contents)
        answer = self._inference.infer(request, *_headers_and_peer(context), can_stream=True)
        async with contextlib.aclosing(answer) as pieces:
            try:
                async for piece in pieces:
                    yield transcode.make_stream_response(
                        piece, is_raw=is_raw, request_id=request.id
                    )
            except inference.HttpRefusal as error:
                yield transcode.make_failure(str(error), request.id)


class _HeadInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # its library has no types
    """Refuses calls without a right before their messages have come; probes need none."""

    def __init__(self, check_head: parser.CheckHead) -> None:
        self._check_head = check_head

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        headers = {k: v for k, v in details.invocation_metadata or () if isinstance(v, str)}
        request = exchange.Request(
            method="POST", path="/v2/models/", query="", headers=headers, body=b"", peer=""
        )
        try:
            if details.method.rpartition("/")[2] not in _PROBES:
                self._check_head(request)
        except parser.RequestRefused as error:
            refusal = error.refusal

            async def refuse(requests: Any, context: Any) -> None:
                del requests
                await context.abort(_code_of(refusal.status), refusal.message)

            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(details)


def _make_credentials(read_tls: Callable[[], GrpcTls]) -> Any:
    """Return credentials that follow the files; gRPC keeps the former while a certificate and a key do not fit."""
    served = read_tls()

    def fetch() -> Any:
        nonlocal served
        with contextlib.suppress(errors.ConfigError):
            if (latest := read_tls()) != served:
                served = latest
                return configure()
        return None

    def configure() -> Any:
        pairs = [(served.key, served.chain)]
        return grpc.ssl_server_certificate_configuration(pairs, served.client_authority)

    return grpc.dynamic_ssl_server_credentials(
        configure(), fetch, require_client_authentication=served.client_authority is not None
    )


def _add_port(server: grpc.aio.Server, address: str, credentials: Any) -> int:
    """Bind the server and return its port. Raises RuntimeError."""
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials))


def _message_class(name: str) -> Any:
    return getattr(kserve_pb2, name)


def _unary(name: str, method: Method) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=_message_class(f"{name}Request").FromString,
        response_serializer=_message_class(f"{name}Response").SerializeToString,
    )


@contextlib.asynccontextmanager
async def _aborting(context: Any, *, ignored_statuses: tuple[int, ...] = ()) -> AsyncIterator[None]:
    """End the call by the status code of an error in the block; an ignored HTTP status ends only the block."""
    try:
        yield
    except inference.HttpRefusal as refusal:
        if refusal.status not in ignored_statuses:
            await context.abort(_code_of(refusal.status), str(refusal))


def _code_of(status: int) -> grpc.StatusCode:
    return _CODE_BY_STATUS.get(status, grpc.StatusCode.INTERNAL)


def _headers_and_peer(context: Any) -> tuple[dict[str, str], str]:
    """Return the call's metadata with text values as headers, and the address of its client."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}, context.peer()
