"""KServe's gRPC service, beside the HTTP server and in front of the same pipeline.

Loaded only if it is asked for, because its library is an extra. This is the one door to grpc.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from dynamo.base import errors
from dynamo.frontend import models, pipeline
from dynamo.frontend.kserve import description, inference, messages, transcode

SERVICE = f"{messages.PACKAGE}.GRPCInferenceService"
MAX_CALLS = 10_000
MAX_PER_STREAM = 256  # requests of one ModelStreamInfer that are answered at once
_CODE_BY_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_logger = logging.getLogger(__name__)
_MESSAGES = messages.CLASS_BY_NAME


class GrpcServer:
    """Serves until stopped."""

    def __init__(
        self,
        answers: pipeline.Pipeline,
        known: models.Models,
        *,
        max_message_bytes: int,
        tls: tuple[str, str] | None = None,
    ) -> None:
        """`tls` is the paths of a certificate chain and its key."""
        self._pipeline = answers
        self._models = known
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; gives the port, which the system chooses for 0. Raises ConfigError."""
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            found = self._listen(address)
        except (RuntimeError, OSError) as error:
            raise errors.ConfigError(
                f"--kserve-grpc-port: cannot listen on {address}: {error}"
            ) from error
        await self._server.start()
        _logger.info("KServe gRPC: listening on %s:%d", host, found)
        return found

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish within `grace_s`, and end. Idempotent."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _listen(self, address: str) -> int:
        assert self._server is not None
        if self._tls is None:
            return int(self._server.add_insecure_port(address))
        chain, key = (Path(path).read_bytes() for path in self._tls)
        credentials = grpc.ssl_server_credentials([(key, chain)])
        return int(self._server.add_secure_port(address, credentials))

    def _handlers(self) -> grpc.GenericRpcHandler:
        """The methods of the service by name."""
        unary = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
        }
        methods = {name: _unary(name, _answering(name, tell)) for name, tell in unary.items()}
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            self._model_infer,
            request_deserializer=_MESSAGES["ModelInferRequest"].FromString,
            response_serializer=_MESSAGES["ModelInferResponse"].SerializeToString,
        )
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            request_deserializer=_MESSAGES["ModelInferRequest"].FromString,
            response_serializer=_MESSAGES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _server_live(self, request: Any) -> dict[str, Any]:
        del request
        return {"live": True}

    def _server_ready(self, request: Any) -> dict[str, Any]:
        del request
        return {"ready": bool(self._models.ready)}

    def _server_metadata(self, request: Any) -> dict[str, Any]:
        del request
        return description.of_server()

    def _model_ready(self, request: Any) -> dict[str, Any]:
        return {"ready": description.is_ready(self._models, request.name, request.version)}

    def _model_metadata(self, request: Any) -> dict[str, Any]:
        return description.of_model(description.find(self._models, request.name, request.version))

    def _model_config(self, request: Any) -> dict[str, Any]:
        found = description.find(self._models, request.name, request.version)
        return {"config": description.config_of(found)}

    async def _model_infer(self, request: Any, context: Any) -> Any:
        """One request, one answer."""
        answered = self._answer(request, context, can_stream=False)
        try:
            (whole,) = [found async for found in answered]
        except errors.DynamoError as error:
            await _abort(context, error)
            raise
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
        async with contextlib.aclosing(self._answer(request, context, can_stream=True)) as pieces:
            try:
                async for piece in pieces:
                    yield transcode.stream_response(piece, is_raw=is_raw, request_id=request.id)
            except errors.DynamoError as error:
                yield transcode.failure(str(error), request.id)

    def _answer(
        self, request: Any, context: Any, *, can_stream: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Metadata are headers; those whose value is bytes are none."""
        metadata = context.invocation_metadata() or ()
        return inference.answer(
            self._pipeline,
            request,
            headers={key: value for key, value in metadata if isinstance(value, str)},
            peer=context.peer(),
            can_stream=can_stream,
        )


def _unary(name: str, method: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=_MESSAGES[f"{name}Request"].FromString,
        response_serializer=_MESSAGES[f"{name}Response"].SerializeToString,
    )


def _answering(
    name: str, tell: Callable[[Any], dict[str, Any]]
) -> Callable[[Any, Any], Awaitable[Any]]:
    """A method that tells what is known, without a worker."""

    async def method(request: Any, context: Any) -> Any:
        try:
            return _MESSAGES[f"{name}Response"](**tell(request))
        except errors.DynamoError as error:
            await _abort(context, error)
            raise

    return method


async def _abort(context: Any, error: errors.DynamoError) -> None:
    code = _CODE_BY_STATUS.get(inference.status_of(error), grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error))
