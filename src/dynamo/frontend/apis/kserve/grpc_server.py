"""KServe's gRPC service, beside the HTTP server and in front of the same handler.

Loaded only if it is asked for, because its library is an extra. This is the one door to grpc.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from dynamo.base import errors
from dynamo.frontend.apis.kserve import inference, messages, transcode
from dynamo.runtime.http import exchange

SERVICE = f"{messages.PACKAGE}.GRPCInferenceService"
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
_logger = logging.getLogger(__name__)
_MESSAGES = messages.CLASS_BY_NAME
Method = Callable[[Any, Any], Awaitable[Any]]  # of a request and its context


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files, by content."""

    chain: bytes
    key: bytes
    client_authority: bytes | None  # whose certificates clients must show


class GrpcServer:
    """Serves until stopped."""

    def __init__(
        self,
        handler: exchange.Handler,
        *,
        max_message_bytes: int,
        tls: Tls | None,
        shares_port: bool,
    ) -> None:
        self._inference = inference.Inference(handler)
        self._tls = tls
        self._options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", int(shares_port)),
        ]
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; gives the port, which the system chooses for 0. Raises ConfigError."""
        made = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=MAX_CALLS)
        made.add_generic_rpc_handlers((self._handlers(),))
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            found = _listen(made, address, self._tls)
        except RuntimeError as error:
            raise errors.ConfigError(
                f"--kserve-grpc-port: cannot listen on {address}: {error}"
            ) from error
        await made.start()
        self._server = made
        _logger.info("KServe gRPC: listening on %s:%d", host, found)
        return found

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish within `grace_s`, and end. Idempotent."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _handlers(self) -> grpc.GenericRpcHandler:
        """The methods of the service by name."""
        looks: dict[str, Callable[[Any], str]] = {  # where HTTP tells the same
            "ServerLive": lambda _: "/v2/health/live",
            "ServerReady": lambda _: "/v2/health/ready",
            "ServerMetadata": lambda _: "/v2",
            "ModelMetadata": lambda asked: inference.path_of(asked.name, asked.version),
        }
        methods = {name: _unary(name, self._looking(name, path)) for name, path in looks.items()}
        methods["ModelReady"] = _unary("ModelReady", self._model_ready)
        methods["ModelConfig"] = _unary("ModelConfig", self._model_config)
        methods["ModelInfer"] = _unary("ModelInfer", self._model_infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            request_deserializer=_MESSAGES["ModelInferRequest"].FromString,
            response_serializer=_MESSAGES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _looking(self, name: str, path_of: Callable[[Any], str]) -> Method:
        async def method(request: Any, context: Any) -> Any:
            async with _aborting(context):
                told = await self._inference.look(path_of(request), *_who(context))
                return _MESSAGES[f"{name}Response"](**told)

        return method

    async def _model_ready(self, request: Any, context: Any) -> Any:
        """A model that nobody knows is not ready, which is no error."""
        path = inference.path_of(request.name, request.version) + "/ready"
        is_ready = False
        async with _aborting(context, but=(400, 404, 503)):
            is_ready = (await self._inference.look(path, *_who(context)))["ready"]
        return _MESSAGES["ModelReadyResponse"](ready=is_ready)

    async def _model_config(self, request: Any, context: Any) -> Any:
        path = inference.path_of(request.name, request.version) + "/config"
        async with _aborting(context):
            config = await self._inference.look(path, *_who(context))
            return _MESSAGES["ModelConfigResponse"](config=config)

    async def _model_infer(self, request: Any, context: Any) -> Any:
        """One request, one answer."""
        async with _aborting(context):
            pieces = self._inference.answer(request, *_who(context), can_stream=False)
            (whole,) = [piece async for piece in pieces]
            return transcode.response(whole, is_raw=bool(request.raw_input_contents))

    async def _model_stream_infer(self, asked: AsyncIterator[Any], context: Any) -> None:
        """Any number of requests, each answered by one message or many, as they come."""
        writing = asyncio.Lock()
        slots = asyncio.Semaphore(MAX_PER_STREAM)

        async def tell(request: Any) -> None:
            async with contextlib.aclosing(self._stream_answer(request, context)) as told:
                try:
                    async for message in told:
                        async with writing:
                            await context.write(message)
                except grpc.aio.BaseError as error:
                    _logger.debug("the client left while a message was written: %r", error)
                finally:
                    slots.release()

        async with asyncio.TaskGroup() as running:
            async for request in asked:
                await slots.acquire()
                running.create_task(tell(request))

    async def _stream_answer(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        is_raw = bool(request.raw_input_contents)
        answer = self._inference.answer(request, *_who(context), can_stream=True)
        async with contextlib.aclosing(answer) as pieces:
            try:
                async for piece in pieces:
                    yield transcode.stream_response(piece, is_raw=is_raw, request_id=request.id)
            except inference.Refused as error:
                yield transcode.failure(str(error), request.id)


def _listen(made: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    """Raises RuntimeError."""
    if tls is None:
        return int(made.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials(
        [(tls.key, tls.chain)],
        root_certificates=tls.client_authority,
        require_client_auth=tls.client_authority is not None,
    )
    return int(made.add_secure_port(address, credentials))


def _unary(name: str, method: Method) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=_MESSAGES[f"{name}Request"].FromString,
        response_serializer=_MESSAGES[f"{name}Response"].SerializeToString,
    )


@contextlib.asynccontextmanager
async def _aborting(context: Any, *, but: tuple[int, ...] = ()) -> AsyncIterator[None]:
    """An error within ends the call by its status code, except for these HTTP statuses, which end only the block."""
    try:
        yield
    except inference.Refused as refused:
        if refused.status not in but:
            code = _CODE_BY_STATUS.get(refused.status, grpc.StatusCode.INTERNAL)
            await context.abort(code, str(refused))


def _who(context: Any) -> tuple[dict[str, str], str]:
    """Metadata as headers (those whose value is bytes are none), and the peer."""
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}, context.peer()
