"""OpenAI's Responses API: a conversation with earlier turns that the server may have stored."""

import functools
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import chat, error_dialects, files, openapi, tokenize
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_ID,
    GENERATION_ERRORS,
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.apis.responses import answer, request
from dynamo.frontend.apis.responses import tools as response_tools
from dynamo.frontend.batches import lines
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.frontend.processes import peers, response_store
from dynamo.preprocess import conversation, inputs
from dynamo.protocols import model_errors
from dynamo.runtime.http import exchange, json_body

R = TypeVar("R", bound=request.ResponseCountRequest)
PATH = "/v1/responses"
_ID_PATH = PATH + "/"
_MAX_PAGE, _USUAL_PAGE = 100, 20  # items, as with OpenAI
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_input = msgspec.json.Decoder(str | list[dict[str, Any]]).decode
_MAX_REFERENCED_BYTES = 16 * 2**20  # of the responses whose items one request names


class _Output(msgspec.Struct, frozen=True):
    """The items of a stored response."""

    output: list[dict[str, Any]]


_decode_output = msgspec.json.Decoder(_Output).decode


class ResponseTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """The length of a prompt."""

    input_tokens: int


class ResponseConversation(inputs.Conversation, frozen=True, kw_only=True):
    """The conversation of a request."""

    tenant: str  # of the client's API key
    request: request.ResponsesRequest
    stored_messages: list[dict[str, Any]]  # without the instructions, which are for this turn only

    @property
    def format_param(self) -> str:
        return "text.format"

    @property
    def effort_param(self) -> str:
        return "reasoning.effort"


class Responses:
    """Decodes requests, which may continue a stored answer, and stores the answers."""

    def __init__(self, handlers: RequestHandlers, store: response_store.ResponseStore) -> None:
        self._handlers = handlers
        self._tenant_of = handlers.rights.tenant_of
        self._store = store

    def generate(self, client: exchange.Exchange) -> Awaitable[None] | None:
        """Answer a request, and store the answer (`POST /v1/responses`)."""
        api: pipeline.GenerationApi[ResponseConversation, answer.ResponseFormatter]
        api = pipeline.GenerationApi(
            endpoint="responses",
            decode=lambda body: self.decode(self._tenant_of(client), body),
            prepare=functools.partial(chat.prepare, param="input"),
            make_formatter=lambda turn, answer_identity: answer.ResponseFormatter(
                turn.request, answer_identity, functools.partial(self._store_turn, turn)
            ),
            stream=streaming.EventDelivery,
            dialect=error_dialects.OPENAI,
        )
        return self._handlers.generate(api)(client)

    def count_tokens(self, client: exchange.Exchange) -> Awaitable[None] | None:
        """Answer with the length of a request's prompt (`POST /v1/responses/input_tokens`)."""

        async def count(asked: inputs.Conversation, model: RegisteredModel) -> ResponseTokens:
            return ResponseTokens(await tokenize.count_tokens(asked, model))

        def decode(body: bytes) -> inputs.Conversation:
            return self.decode_count(self._tenant_of(client), body)

        return self._handlers.compute_by_model(decode, count)(client)

    def decode(self, tenant: str, body: bytes) -> ResponseConversation:
        """Return the conversation of a tenant's request in this JSON body. Raises RequestError."""
        decoded = self._resolve_references(request.decode(body), tenant)
        tools = response_tools.convert_tools(decoded.tools or [])
        messages = self._collect_messages(decoded, tenant)
        return ResponseConversation(
            tenant=tenant,
            request=decoded,
            stored_messages=messages,
            model=decoded.model,
            messages=[*_instructions(decoded), *messages],
            **{name: getattr(decoded, name) for name in inputs.EngineFields.__struct_fields__},
            max_completion_tokens=decoded.max_output_tokens,
            temperature=decoded.temperature,
            top_p=decoded.top_p,
            stream=decoded.stream,
            tools=tools,
            tool_choice=decoded.chat_tool_choice,
            response_format=decoded.response_format,
            reasoning_effort=decoded.effort,
            parallel_tool_calls=decoded.parallel_tool_calls,
            prompt_cache_retention=decoded.prompt_cache_retention,
        )

    def decode_count(self, tenant: str, body: bytes) -> inputs.Conversation:
        """Return the conversation of a request to count tokens. Raises RequestError."""
        decoded = self._resolve_references(request.decode_count(body), tenant)
        tools = response_tools.convert_tools(decoded.tools or [])
        messages = [*_instructions(decoded), *self._collect_messages(decoded, tenant)]
        return inputs.Conversation(
            model=decoded.model,
            messages=messages,
            tools=tools,
            tool_choice=decoded.chat_tool_choice,
            reasoning_effort=decoded.effort,
        )

    def show(self, client: exchange.Exchange) -> None:
        """Answer with a stored response (`GET /v1/responses/{id}`)."""
        options = dict(parse_qsl(client.request.query))
        if options.get("stream", "false") != "false":
            error = errors.InvalidRequest.of_param(
                "stream", "not supported for a stored response; leave it out"
            )
            delivery.respond_error(client, error, error_dialects.OPENAI)
            return
        stored = self._store.find(_response_id(client), self._tenant_of(client))
        if stored is None:
            _respond_unknown(client)
        else:
            client.respond(200, stored.response)

    def delete(self, client: exchange.Exchange) -> None:
        """Delete a stored response (`DELETE /v1/responses/{id}`)."""
        response_id = _response_id(client)
        if self._store.find(response_id, self._tenant_of(client)) is not None:
            self._store.remove(response_id)
            body = {"id": response_id, "object": "response", "deleted": True}
            client.respond(200, sse.encode(body))
        else:
            _respond_unknown(client)

    async def list_input_items(self, client: exchange.Exchange) -> None:
        """Answer with the items of a stored response's input (`GET /v1/responses/{id}/input_items`)."""
        stored = self._store.find(_response_id(client), self._tenant_of(client))
        if stored is None:
            _respond_unknown(client)
            return
        try:
            options, _ = files.page_options(client, _MAX_PAGE, _USUAL_PAGE)
            encode = functools.partial(_encode_page, options, _response_id(client))
            body = await exchange.decode_apart(stored.input_items, encode)
        except errors.InvalidRequest as error:
            delivery.respond_error(client, error, error_dialects.OPENAI)
            return
        client.respond(200, body)

    def cancel(self, client: exchange.Exchange) -> None:
        """Refuse to cancel a stored response: none was made in the background (`POST …/cancel`)."""
        if self._store.find(_response_id(client), self._tenant_of(client)) is None:
            _respond_unknown(client)
            return
        message = "Cannot cancel a synchronous response: only those with background true can be"
        client.respond(400, error_dialects.OPENAI.refusal(400, message))

    def _resolve_references(self, decoded: R, tenant: str) -> R:
        """Return the request with items of stored responses in the place of references. Raises RequestError."""
        if isinstance(decoded.input, str):
            return decoded
        stored = _StoredItems(self._store, tenant)
        items = [
            stored.take(item.get("id"), f"input[{number}].id")
            if item.get("type") == response_store.ITEM_REFERENCE
            else item
            for number, item in enumerate(decoded.input)
        ]
        return msgspec.structs.replace(decoded, input=items)

    def _collect_messages(
        self, decoded: request.ResponseCountRequest, tenant: str
    ) -> list[dict[str, Any]]:
        """Return the messages of the stored response that this request continues, and its own; its tools are valid."""
        messages = request.convert_items(
            decoded.input, response_tools.list_renamed(decoded.tools or [])
        )
        if decoded.previous_response_id is not None:
            stored = self._store.find(decoded.previous_response_id, tenant)
            if stored is None:
                raise model_errors.ResponseNotFound(
                    f"Previous response with id {decoded.previous_response_id[:100]!r} not found: answers are kept "
                    "for a limited time, unless store is false",
                    param="previous_response_id",
                )
            messages = [*_decode_objects(stored.conversation), *messages]
        conversation.check_arguments(messages)
        return messages

    def _store_turn(self, turn: ResponseConversation, response: dict[str, Any]) -> None:
        if not turn.request.is_stored:
            return
        renamed = response_tools.list_renamed(turn.request.tools or [])
        messages = [*turn.stored_messages, *request.convert_items(response["output"], renamed)]
        stored = response_store.StoredResponse(
            sse.encode(response), sse.encode(messages), turn.tenant, sse.encode(turn.request.input)
        )
        self._store.put(response["id"], stored)


class _StoredItems:
    """The items that one request names, each once and of few bytes: otherwise its prompt could become endless."""

    def __init__(self, store: response_store.ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._items: dict[str, dict[str, Any]] = {}  # of the responses that were read
        self._used_ids: set[str] = set()
        self._num_bytes = 0

    def take(self, item_id: Any, param: str) -> dict[str, Any]:
        """Return the item of this id, which the field `param` has. Raises ObjectNotFound or InvalidRequest."""
        if not isinstance(item_id, str) or item_id in self._used_ids:
            raise errors.InvalidRequest(
                f"{param}: expected the id of an item, each once, got {json_body.describe(item_id)}",
                param=param,
            )
        if item_id not in self._items:
            self._read_response(item_id)
        if self._num_bytes > _MAX_REFERENCED_BYTES:
            expected = f"items of responses of at most {_MAX_REFERENCED_BYTES} bytes together"
            raise errors.InvalidRequest(f"{param}: expected {expected}, got more", param=param)
        if item_id not in self._items:
            raise model_errors.ObjectNotFound(
                f"Item with id {item_id[:100]!r} not found: items are kept for a limited time, unless store is false",
                param=param,
            )
        self._used_ids.add(item_id)
        return self._items[item_id]

    def _read_response(self, item_id: str) -> None:
        """Add all items of the response that has this one."""
        response_id = response_store.response_of(item_id)
        stored = self._store.find(response_id, self._tenant)
        if stored is None:
            return
        self._num_bytes += len(stored.response) + len(stored.input_items)
        if self._num_bytes <= _MAX_REFERENCED_BYTES:
            output = _decode_output(stored.response).output
            items = [*_list_items(response_id, stored.input_items), *output]
            self._items |= {item["id"]: item for item in items}


_TEXTS = (request.TextPart, request.RefusalPart)
_ONLY_TEXT = openapi.text_or_parts(*_TEXTS)
_CONTENT = openapi.text_or_parts(
    *_TEXTS, openapi.with_fields(request.ImagePart, image_url=openapi.IMAGE_URL)
)
_ITEMS = openapi.list_of(
    {
        "anyOf": [
            openapi.with_fields(
                request.MessageItem, role={"const": "assistant"}, content=_ONLY_TEXT
            ),
            openapi.with_fields(
                request.MessageItem,
                role={"enum": ["user", "system", "developer"]},
                content=_CONTENT,
            ),
            request.FunctionCallItem,
            request.CustomCallItem,
            openapi.with_fields(request.FunctionOutputItem, output=_CONTENT),
            openapi.make_object(
                ("type", "id"),
                type={"const": response_store.ITEM_REFERENCE},
                id=openapi.SOME_TEXT,
            ),
            openapi.with_fields(
                request.ReasoningItem, content={"anyOf": [_ONLY_TEXT["anyOf"][1], openapi.NULL]}
            ),
        ]
    }
)
_CLIENT_TOOL = (response_tools.FunctionTool, response_tools.CustomTool)
_NAMESPACE = openapi.make_object(
    ("type", "tools"),
    type={"const": "namespace"},
    tools={"type": "array", "items": {"anyOf": [*_CLIENT_TOOL]}},
)
_OTHER_TOOL = openapi.make_object(("type",), type={"enum": [*response_tools.DISPENSABLE_TOOLS]})
_TOOLS = {
    "type": "array",
    "maxItems": inputs.MAX_TOOLS,
    "items": {"anyOf": [*_CLIENT_TOOL, _NAMESPACE, _OTHER_TOOL]},
}
_PROMPT = {
    "input": {"anyOf": [openapi.TEXT, _ITEMS]},
    "tools": openapi.or_null(_TOOLS),
    "logit_bias": openapi.LOGIT_BIAS,
    "prompt_logprobs": openapi.NULL,
}
_NO_LOGPROBS = {"type": "string", "not": {"const": "message.output_text.logprobs"}}
_INCLUDE = openapi.or_null({"type": "array", "items": _NO_LOGPROBS})
_TOOL_CHOICE = openapi.make_object(
    (),
    tool_choice={
        "anyOf": [
            openapi.NULL,
            openapi.TEXT,
            openapi.make_object(
                ("type", "name"),
                type={"enum": ["function", "custom"]},
                name=openapi.SOME_TEXT,
            ),
            openapi.make_object(
                ("type", "mode", "tools"),
                type={"const": "allowed_tools"},
                mode=openapi.TEXT,
                tools={"type": "array"},
            ),
        ]
    },
)


def operations(handlers: RequestHandlers, shared: peers.SharedResponses) -> Sequence[Operation]:
    responses = Responses(handlers, shared.store)
    stored_path = _ID_PATH + ANY_ID
    api = Operations(tag="OpenAI", errors=(400, *ACCESS_ERRORS, 404))

    def of_stored(handler: exchange.Handler) -> exchange.Handler:
        return add_request_id(shared.wrap_lookup(_response_id, handler))

    api.post(
        PATH,
        "Answer, and store the answer so that a request can continue it",
        request=request.ResponsesRequest,
        request_details=_PROMPT | {"background": {"enum": [False, None]}, "include": _INCLUDE},
        request_rules=(_TOOL_CHOICE,),
        answer=answer.Response,
        events=answer.ResponseEvent,
        errors=GENERATION_ERRORS,
        example={"input": "Who are you?", "max_output_tokens": 60},
    )(shared.wrap_continuing(responses.generate))
    api.get(stored_path, "A stored answer", wrap=of_stored, answer=answer.Response)(responses.show)
    api.declare(
        "DELETE",
        stored_path,
        "Delete a stored answer",
        wrap=of_stored,
        answer=answer.DeletedResponse,
        errors=(*ACCESS_ERRORS, 404),
    )(responses.delete)
    api.get(
        f"{stored_path}/input_items",
        "The items of a stored answer's input",
        wrap=of_stored,
        answer=answer.InputItemList,
    )(responses.list_input_items)
    api.post(
        f"{stored_path}/cancel",
        "Cancel an answer in the background, of which there are none",
        wrap=of_stored,
        answer=None,
    )(responses.cancel)
    api.post(
        f"{PATH}/input_tokens",
        "Count the tokens of such a request",
        request=request.ResponseCountRequest,
        request_details=_PROMPT,
        request_rules=(_TOOL_CHOICE,),
        answer=ResponseTokens,
        errors=READ_ERRORS,
        example={"input": "Who are you?"},
    )(shared.wrap_continuing(responses.count_tokens))

    @api.post(
        f"{PATH}/compact",
        "Compact a conversation, which is not supported",
        wrap=add_request_id,
        answer=None,
        errors=(*ACCESS_ERRORS, 404),
    )
    def refuse_compaction(client: exchange.Exchange) -> None:
        message = (
            "compaction is not supported: send the whole conversation, or previous_response_id"
        )
        client.respond(404, error_dialects.OPENAI.refusal(404, message))

    return api.entries


def _instructions(decoded: request.ResponseCountRequest) -> list[dict[str, Any]]:
    if decoded.instructions is None:
        return []
    return [{"role": "system", "content": decoded.instructions}]


def _response_id(client: exchange.Exchange) -> str:
    return client.request.path.removeprefix(_ID_PATH).partition("/")[0]


def _list_items(response_id: str, stored_input: bytes) -> list[dict[str, Any]]:
    """Return the items of a stored input. They get their ids here: most inputs are never listed."""
    digits = response_id.removeprefix(response_store.RESPONSE_ID)
    return request.list_input(_decode_input(stored_input), digits)


def _encode_page(options: lines.PageOptions, response_id: str, stored_input: bytes) -> bytes:
    """Return a page of the items of a stored input as JSON. Raises InvalidRequest."""
    page, has_more = _select_page(_list_items(response_id, stored_input), options)
    ids = [item["id"] for item in page] or [None]
    body = {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1]}
    return sse.encode({**body, "has_more": has_more})


def _select_page(
    items: list[dict[str, Any]], options: lines.PageOptions
) -> tuple[list[dict[str, Any]], bool]:
    """Return the items of a page, and whether more follow. Raises InvalidRequest."""
    ordered = items if options.is_ascending else items[::-1]
    if options.after is not None:
        ids = [item["id"] for item in ordered]
        if options.after not in ids:
            raise errors.InvalidRequest.of_param(
                "after", f"expected the id of one of the items, got {options.after[:100]!r}"
            )
        ordered = ordered[ids.index(options.after) + 1 :]
    return ordered[: options.limit], len(ordered) > options.limit


def _respond_unknown(client: exchange.Exchange) -> None:
    message = f"Response with id {_response_id(client)[:100]!r} not found."
    client.respond(404, error_dialects.OPENAI.refusal(404, message))
