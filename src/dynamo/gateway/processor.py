"""One HTTP request on its way through Envoy: what to answer to each message of its external-processing stream.

Envoy sends headers, body and trailers of the request, then those of the response. With a buffered body the request's
changes are the answer to its body. With full-duplex streaming the answers to headers and body are given together, once
all of the body has come; the response's body is passed on piece by piece, and so is a request's that is not read.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any
from urllib import parse

import msgspec

from dynamo.base import errors
from dynamo.gateway import ext_proc_pb2 as messages
from dynamo.protocols import model_errors
from dynamo.runtime.http import encodings, exchange, parser
from dynamo.semantic import cache, immediate, request_view, rewriting, routing_outcome, service

ROUTED_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate", "/invocations"),  # Ollama's and SageMaker's
)
# Where the tokens of a prompt are counted, no model is chosen for it.
_COUNTING_PATHS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize")
# What a model is to answer here stands in tensors (KServe), or in a file that was uploaded before (batches).
_UNREADABLE = re.compile(r"/v2/models/.+/(?:infer|generate)\w*|/inference\..+Infer|/v1/batches")
_CHAT = ROUTED_PATHS[0]
_STREAMED, _FULL_DUPLEX = 1, 4
_UNUSABLE_MODES = {0: "NONE", 1: "STREAMED", 3: "BUFFERED_PARTIAL"}  # no whole body comes
# The router's word to a gateway; a client that sends them would choose the server.
_ROUTER_HEADERS = ("x-vsr-destination-endpoint", "x-selected-model")
_OVERWRITE = 2
_logger = logging.getLogger(__name__)
_PIECE_BYTES = 60_000  # of a streamed body: HTTP/2 frames have 64 KiB at most
_STATUS_BY_ERROR: dict[type[errors.DynamoError], int] = {
    errors.InvalidRequest: 400,
    errors.Forbidden: 403,
}


class StreamProcessor:
    """Answers the messages of one stream."""

    removed_headers: Sequence[str] = _ROUTER_HEADERS  # from what a client sends

    def __init__(self, routing: service.RoutingService, max_body_bytes: int) -> None:
        self._routing = routing
        self._max_body_bytes = max_body_bytes
        self.headers: dict[str, str] = {}  # of the request, by names in lower case
        self._body = bytearray()
        self._is_duplex_request = self._is_duplex_response = False
        self._unusable_mode = ""  # in which Envoy sends no whole body
        self._outcome: routing_outcome.RoutedRequest | None = None
        self._is_success = False
        self._recorder: cache.StreamRecorder | None = None
        self._answer_body = bytearray()
        self._has_begun = False  # the body of the answer

    async def process(self, message: Any) -> list[Any]:
        """Return the answers to a message of Envoy, in order."""
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._unusable_mode = _UNUSABLE_MODES.get(modes.request_body_mode, "")
            self._is_duplex_request = modes.request_body_mode == _FULL_DUPLEX
            self._is_duplex_response = modes.response_body_mode == _FULL_DUPLEX
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                return self._take_request_headers(message.request_headers)
            case "request_body":
                return await self._take_request_body(message.request_body)
            case "response_headers":
                return [self._take_response_headers(message.response_headers)]
            case "response_body":
                return self._take_response_body(message.response_body)
            case "request_trailers":
                return await self._take_request_trailers()
            case _:
                self._end_answer()
                return [messages.ProcessingResponse(response_trailers=messages.TrailersResponse())]

    def _take_request_headers(self, headers: Any) -> list[Any]:
        self.headers = _read_headers(headers.headers)
        answer = self._answer_head(has_body=not headers.end_of_stream)
        if answer is not None:
            return [respond_at_once(answer)]
        if self._is_duplex_request and self.reads_body and not headers.end_of_stream:
            return []  # answered with the body
        head = messages.HeadersResponse(response=self._without_claims())
        return [messages.ProcessingResponse(request_headers=head)]

    def _without_claims(self) -> Any:
        """Return the change that takes away the headers by which a client claims to be the router."""
        common = messages.CommonResponse()
        names = [name for name in self.removed_headers if name in self.headers]
        if names:
            common.header_mutation.remove_headers.extend(names)
        return common

    def _answer_head(self, *, has_body: bool) -> immediate.ImmediateAnswer | None:
        """Return the answer that a request gets at once for its headers alone."""
        is_post = self.headers.get(":method") == "POST"
        if is_post and _UNREADABLE.fullmatch(self.path) and self._routing.router.has_guards:
            text = (
                f"the router cannot read what {self.path} asks, and its guards read every request"
            )
            return self._refuse(403, text, "permission_error")
        if self._unusable_mode and has_body and self.reads_body:
            text = (
                "the router reads whole bodies: Envoy's request_body_mode has to be BUFFERED or "
                f"FULL_DUPLEX_STREAMED, and is {self._unusable_mode}"
            )
            _logger.error("a request was refused: %s", text)
            return self._refuse(500, text, "server_error")
        if self.headers.get(":method") == "GET" and self.path == "/v1/models":
            return self._routing.router.list_models()
        return None

    async def _take_request_body(self, body: Any) -> list[Any]:
        if not self.reads_body:
            pieces = _pass_on(body, is_duplex=self._is_duplex_request)
            return [messages.ProcessingResponse(request_body=piece) for piece in pieces]
        self._body += body.body
        if len(self._body) > self._max_body_bytes:
            self._body.clear()
            text = f"expected a body of at most {self._max_body_bytes} bytes, got more"
            return [respond_at_once(self._refuse(413, text, "invalid_request_error"))]
        if self._is_duplex_request and not body.end_of_stream:
            return []
        return await self._finish_request()

    async def _take_request_trailers(self) -> list[Any]:
        trailers = messages.ProcessingResponse(request_trailers=messages.TrailersResponse())
        if not (self._is_duplex_request and self.reads_body):
            return [trailers]
        answers = await self._finish_request(ends_stream=False)
        is_refused = answers[0].WhichOneof("response") == "immediate_response"
        return answers if is_refused else [*answers, trailers]

    async def _finish_request(self, *, ends_stream: bool = True) -> list[Any]:
        """Route the whole request, and return the answers that change it or end it."""
        changed = await self._change_request(bytes(self._body))
        if isinstance(changed, immediate.ImmediateAnswer):
            return [respond_at_once(changed)]
        common, body = changed
        self._body.clear()
        if not self._is_duplex_request:
            if len(common.header_mutation.set_headers):
                common.body_mutation.body = body
            return [
                messages.ProcessingResponse(request_body=messages.BodyResponse(response=common))
            ]
        head = messages.HeadersResponse(response=common)
        pieces = _streamed(body, ends_stream=ends_stream)
        return [
            messages.ProcessingResponse(request_headers=head),
            *(messages.ProcessingResponse(request_body=piece) for piece in pieces),
        ]

    async def _change_request(self, body: bytes) -> "tuple[Any, bytes] | immediate.ImmediateAnswer":
        """Return the changes of the request's head and its new body, or the answer that it gets at once."""
        num_bytes = len(body)
        try:
            if encoding := encodings.read_encoding(self.headers.get("content-encoding", "")):
                body = await encodings.inflate_apart(body, encoding, self._max_body_bytes)
        except parser.RequestRefused as error:
            refusal = error.refusal
            kind = "invalid_request_error"
            return self._refuse(
                refusal.status, refusal.message, kind, headers=tuple(refusal.headers)
            )
        if self.path in _COUNTING_PATHS:
            return await self._name_default(body, num_bytes)
        answer = await self._route(body)
        if answer is not None:
            return answer
        assert self._outcome is not None  # it was routed
        return self._request_changes(self._outcome, num_bytes), self._outcome.body

    async def _name_default(
        self, body: bytes, num_bytes: int
    ) -> "tuple[Any, bytes] | immediate.ImmediateAnswer":
        """Return the same with the default model in the place of a name that asks for a choice."""
        settings = self._routing.router.settings

        def name_default(data: bytes) -> tuple[str, str, bytes]:
            name = request_view.RequestView(data).model
            if name not in settings.auto_names or not settings.default_model:
                return name, name, data
            changed = rewriting.set_model(data, settings.default_model)
            return name, settings.default_model, changed

        try:
            requested_model, model, body = await exchange.decode_apart(body, name_default)
        except errors.InvalidRequest as error:
            return self._refuse(400, str(error), "invalid_request_error", param=error.param)
        explanation = routing_outcome.Explanation(requested_model=requested_model, model=model)
        outcome = routing_outcome.RoutedRequest(explanation=explanation, body=body)
        outcome.add_upstream_headers(settings, {})
        return self._request_changes(outcome, num_bytes), body

    def _refuse(
        self,
        status: int,
        text: str,
        kind: str,
        *,
        param: str | None = None,
        headers: immediate.Headers = (),
    ) -> immediate.ImmediateAnswer:
        """Return an error in the shape of the API that is asked."""
        api = "kserve" if self.path.startswith("/v2/") else request_view.api_of(self.path)
        return immediate.refuse(status, text, kind, api=api, param=param, headers=headers)

    async def _route(self, body: bytes) -> immediate.ImmediateAnswer | None:
        """Route the request; return the answer that it gets at once."""
        headers = self.headers
        api = request_view.api_of(self.path)
        tenant = service.tenant_of(headers)
        try:
            if api == "chat":
                await self._routing.recall(body, headers, tenant)
            classifiers = await self._routing.ask_encoders(body, api)
            outcome = await exchange.decode_apart(
                body,
                lambda data: self._routing.route(data, headers, tenant, None, classifiers, api=api),
                service.ROUTED_AT_ONCE_BYTES,
            )
        except errors.DynamoError as error:
            status = _STATUS_BY_ERROR.get(type(error), 503)
            kind = "invalid_request_error" if status < 500 else "service_unavailable"
            param = error.param if isinstance(error, errors.RequestError) else None
            return self._refuse(status, model_errors.client_message(error), kind, param=param)
        self._outcome = outcome
        if outcome.answer is None:
            return None
        names = outcome.answer_headers()
        if self.path != _CHAT:
            guard = outcome.explanation.verdicts[-1].guard
            text = f"the request was refused by the {guard} guard; rephrase it and ask again"
            return self._refuse(403, text, "permission_error", headers=names)
        return msgspec.structs.replace(outcome.answer, headers=names)

    def _request_changes(self, outcome: routing_outcome.RoutedRequest, num_bytes: int) -> Any:
        headers = list(outcome.upstream_headers)
        if len(outcome.body) != num_bytes or "content-encoding" in self.headers:
            headers.append(("content-length", str(len(outcome.body))))
        mutation = make_mutation(headers)
        mutation.remove_headers.extend(outcome.removed_headers)
        set_names = dict(headers)
        claims = self._without_claims().header_mutation.remove_headers
        mutation.remove_headers.extend(name for name in claims if name not in set_names)
        if "content-encoding" in self.headers:
            mutation.remove_headers.append("content-encoding")  # the body goes on as it was read
        # a compressed answer could be neither counted nor cached
        mutation.remove_headers.append("accept-encoding")
        if self._is_duplex_request:  # a streamed body has no length that is known before
            mutation.remove_headers.append("content-length")
        return messages.CommonResponse(
            header_mutation=mutation,
            clear_route_cache=self._routing.router.settings.clear_route_cache,
        )

    def _take_response_headers(self, headers: Any) -> Any:
        received = _read_headers(headers.headers)
        status = received.get(":status", "")
        self._is_success = status.startswith("2")
        common = messages.CommonResponse()
        response = messages.ProcessingResponse(
            response_headers=messages.HeadersResponse(response=common)
        )
        content_type = received.get("content-type", "")
        if content_type.startswith(cache.STREAM_TYPES) and not self._is_duplex_response:
            response.mode_override.response_body_mode = _STREAMED
        if self._outcome is None:
            return response
        if status.startswith(("4", "5")):
            self._routing.record_failure(self._outcome, int(status))
        if self._is_success:
            common.header_mutation.CopyFrom(make_mutation(self._outcome.explanation.headers()))
            response.response_headers.response.CopyFrom(common)
        keeps_text = self._outcome.cache_key is not None
        self._recorder = cache.make_recorder(content_type, keeps_text=keeps_text)
        return response

    def _take_response_body(self, body: Any) -> list[Any]:
        if self._outcome is not None and self._is_success:
            self._record(self._outcome, body)
        pieces = _pass_on(body, is_duplex=self._is_duplex_response)
        return [messages.ProcessingResponse(response_body=piece) for piece in pieces]

    def _record(self, outcome: routing_outcome.RoutedRequest, body: Any) -> None:
        """Keep a piece of the answer for usage and cache, and hand all of it over when it is complete."""
        if not self._has_begun:
            self._has_begun = True
            self._routing.record_first_piece(outcome, body.body)
        if self._recorder is not None:
            self._recorder.feed(body.body)
        elif len(self._answer_body) <= cache.MAX_BODY:
            self._answer_body += body.body
        if body.end_of_stream:
            self._end_answer()

    def _end_answer(self) -> None:
        """Hand over an answer when its body, or the trailers behind it, have come: once, if both say so."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or not self._has_begun:
            return
        if self._recorder is not None:
            self._routing.record_stream(outcome, self._recorder)
        else:
            self._routing.record_answer(outcome, bytes(self._answer_body) or None)

    @property
    def path(self) -> str:
        """The path of the request, without its query, as the frontend behind Envoy decodes it."""
        return parse.unquote(self.headers.get(":path", "").partition("?")[0])

    @property
    def reads_body(self) -> bool:
        """Return whether the body of the request is read, and not only passed on."""
        return (
            self.path in (*ROUTED_PATHS, *_COUNTING_PATHS) and self.headers.get(":method") == "POST"
        )


def _read_headers(headers: Any) -> dict[str, str]:
    """Return headers by name in lower case; Envoy sends their values as bytes."""
    return {
        header.key.lower(): header.raw_value.decode("latin-1") if header.raw_value else header.value
        for header in headers.headers
    }


def make_mutation(headers: list[tuple[str, str]]) -> Any:
    """Return the message that sets these headers."""
    return messages.HeaderMutation(
        set_headers=[
            messages.HeaderValueOption(
                header=messages.HeaderValue(key=name, raw_value=value.encode()),
                append_action=_OVERWRITE,
            )
            for name, value in headers
        ]
    )


def respond_at_once(answer: immediate.ImmediateAnswer) -> Any:
    """Return the message that ends the request with this answer."""
    headers = [("content-type", answer.content_type), *answer.headers]
    return messages.ProcessingResponse(
        immediate_response=messages.ImmediateResponse(
            status=messages.HttpStatus(code=answer.status),
            headers=make_mutation(headers),
            body=answer.body,
        )
    )


def _pass_on(body: Any, *, is_duplex: bool) -> list[Any]:
    """Return what lets a body, or a piece of one, pass as it came."""
    if is_duplex:
        return _streamed(body.body, ends_stream=body.end_of_stream)
    return [messages.BodyResponse()]


def _streamed(body: bytes, *, ends_stream: bool) -> list[Any]:
    """Return the pieces of a streamed body; the last one may end the stream."""
    starts = range(0, len(body), _PIECE_BYTES) or (0,)
    return [
        messages.BodyResponse(
            response=messages.CommonResponse(
                body_mutation=messages.BodyMutation(
                    streamed_response=messages.StreamedBodyResponse(
                        body=body[start : start + _PIECE_BYTES],
                        end_of_stream=ends_stream and start + _PIECE_BYTES >= len(body),
                    )
                )
            )
        )
        for start in starts
    ]
