"""The answer of the Responses API: its types for the description, and its formatter, for events or one object.

Output is a list of items: a message for text, `reasoning` for thoughts, `function_call`. In a stream one item is open
at a time, and a piece of another kind closes it. An item with text has one part; a function call has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis.responses import request as responses_request
from dynamo.frontend.apis.responses import tools as response_tools
from dynamo.frontend.delivery import choices, sse
from dynamo.preprocess import conversation
from dynamo.preprocess.parsers import call_syntax
from dynamo.protocols import model_errors

_MARKS = ("\u0000", "\u0001")  # in the place of a text and of a number
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# by the type of the item: the name of its text's events, the key of the text, other fields
_TEXT_EVENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("output_text", "text", {"logprobs": []}),
    "reasoning": ("reasoning_text", "text", {}),
    "function_call": ("function_call_arguments", "arguments", {}),
    "custom_tool_call": ("custom_tool_call_input", "input", {}),
}
# by the type of a tool: the keys that an answer repeats even where the request left them out
_TOOL_DEFAULTS: dict[str, dict[str, Any]] = {
    "function": {"description": None, "parameters": None, "strict": True},
    "custom": {"description": None, "format": {"type": "text"}},
}
Store = Callable[[dict[str, Any]], None]  # takes a complete response


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of the prompt and the answer."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseItem(msgspec.Struct, kw_only=True):
    """A message, reasoning or a tool call."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]


class Response(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[ResponseItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    metadata: dict[str, str]
    previous_response_id: str | None
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    tools: list[dict[str, Any]]
    store: bool


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The data of an event of a streamed answer; its other fields depend on the type."""

    type: str
    sequence_number: int


class InputItemList(msgspec.Struct, kw_only=True):
    """The items of a stored response's input, or a page of them."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The confirmation that a stored response was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


@dataclass(slots=True)
class _OpenItem:
    """The item that grows."""

    key: object  # equal for all pieces of the item
    item: dict[str, Any]
    place: dict[str, Any]
    delta: tuple[bytes, bytes, bytes]  # the bytes around the text and the number of its deltas
    texts: list[str] = field(default_factory=list)


class ResponseFormatter:
    """Formats the answer to one request; `store` is called once, when the answer is complete."""

    def __init__(
        self,
        request: responses_request.ResponsesRequest,
        answer_identity: sse.Identity,
        store: Store,
    ) -> None:
        self._digits = answer_identity.request_id.replace("-", "")
        self._clock = answer_identity.clock
        self._store = store
        self._tools = response_tools.map_tools(request.tools or [])
        self._fixed = _fixed_fields(request, answer_identity)
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._num_events = 0

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        (answer,) = answers
        pieces = answer.pieces or ("",)
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            status = _status(answer.finish_reason) if number == last else "completed"
            item = self._new_item(piece, number)
            self._items.append(_complete_item(item, self._text_of(piece), status))
        return self._complete(answer.finish_reason, usage)

    def begin(self, usage: sse.Usage) -> bytes:
        """Return the events with the response before it has any output."""
        del usage
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: choices.Piece) -> bytes:
        """Return a delta of the open item, after the start of a new item where the kind changes."""
        events = b""
        if self._open is None or self._open.key != _key_of(piece):
            events, self._open = self._open_item(piece)
        text = self._text_of(piece)
        self._open.texts.append(text)
        number, self._num_events = self._num_events, self._num_events + 1
        head, middle, tail = self._open.delta
        return b"%b%b%b%b%d%b" % (events, head, sse.encode_inline(text), middle, number, tail)

    def end(self, finish_reason: str, stop_string: str | None, usage: sse.Usage) -> bytes:
        """Return the events that close the open item and the response."""
        del stop_string
        events = b""
        if self._open is None:
            events, self._open = self._open_item("")
        events += self._close_item(_status(finish_reason))
        response = self._complete(finish_reason, usage)
        return events + self._event(f"response.{response['status']}", response=response)

    def error(self, error: errors.DynamoError) -> bytes:
        """Return the last event of a failed stream, which has the output so far."""
        items = [*self._items]
        if self._open is not None:
            items.append(_complete_item(self._open.item, "".join(self._open.texts), "incomplete"))
        failed = self._response("failed", items, None)
        failed["error"] = {"code": "server_error", "message": model_errors.client_message(error)}
        return self._event("response.failed", response=failed)

    def _open_item(self, piece: choices.Piece) -> tuple[bytes, _OpenItem]:
        """Return the events that begin an item for this piece, and the item."""
        events = self._close_item("completed")
        number = len(self._items)
        item = self._new_item(piece, number)
        place = {"item_id": item["id"], "output_index": number}
        events += self._event("response.output_item.added", output_index=number, item=item)
        if "content" in item:
            place["content_index"] = 0
            part = _part(item, "")
            events += self._event("response.content_part.added", **place, part=part)
        return events, _OpenItem(_key_of(piece), item, place, _delta_template(item, place))

    def _close_item(self, status: str) -> bytes:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return b""
        item, place, text = self._open.item, self._open.place, "".join(self._open.texts)
        self._open = None
        completed = _complete_item(item, text, status)
        self._items.append(completed)
        name, key, other_fields = _TEXT_EVENTS[item["type"]]
        events = self._event(f"response.{name}.done", **place, **{key: text}, **other_fields)
        if "content" in item:
            part = completed["content"][0]
            events += self._event("response.content_part.done", **place, part=part)
        number = place["output_index"]
        return events + self._event(
            "response.output_item.done", output_index=number, item=completed
        )

    def _new_item(self, piece: choices.Piece, number: int) -> dict[str, Any]:
        """Return the item that a piece of this kind begins, before it has any text."""
        if isinstance(piece, choices.Call):
            tool = self._tool_of(piece)
            is_custom = tool.is_custom
            kind, prefix = ("custom_tool_call", "ctc") if is_custom else ("function_call", "fc")
            return {
                "type": kind,
                "id": f"{prefix}_{self._digits}{number:02x}",
                "call_id": piece.id,
                "name": tool.name,
                _TEXT_EVENTS[kind][1]: "",
                "status": "in_progress",
                **({} if tool.namespace is None else {"namespace": tool.namespace}),
            }
        empty = {"status": "in_progress", "content": []}
        if isinstance(piece, str):
            item_id = f"msg_{self._digits}{number:02x}"
            return {"type": "message", "id": item_id, "role": "assistant", **empty}
        return {"type": "reasoning", "id": f"rs_{self._digits}{number:02x}", "summary": [], **empty}

    def _text_of(self, piece: choices.Piece) -> str:
        if isinstance(piece, str):
            return piece
        if not isinstance(piece, choices.Call):
            return piece.text
        if self._tool_of(piece).is_custom:
            return conversation.custom_input(piece.arguments)
        return piece.arguments

    def _tool_of(self, call: choices.Call) -> response_tools.ClientTool:
        """Return the tool of a call as the client named it, or, if it is none of the client's, as the model did."""
        return self._tools.get(call.name) or response_tools.ClientTool(call.name, None, False)

    def _complete(self, finish_reason: str, usage: sse.Usage) -> dict[str, Any]:
        response = self._response(_status(finish_reason), self._items, _usage(usage))
        reason = _INCOMPLETE.get(finish_reason)
        response["incomplete_details"] = {"reason": reason} if reason else None
        if reason is None:
            response["completed_at"] = int(self._clock.wall())
        self._store(response)
        return response

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": "resp_" + self._digits,
            "status": status,
            "output": output,
            "usage": usage,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            **self._fixed,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return sse.typed_event({"type": kind, **fields, "sequence_number": number})


def _complete_item(item: dict[str, Any], text: str, status: str) -> dict[str, Any]:
    """Return the item with its text; the arguments of a call that broke off in a stream are no JSON."""
    if item["type"] == "function_call" and not (text and call_syntax.parse_call("_", text)):
        status = "incomplete"
    if item["type"] in ("function_call", "custom_tool_call"):
        return {**item, _TEXT_EVENTS[item["type"]][1]: text, "status": status}
    return {**item, "status": status, "content": [_part(item, text)]}


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _key_of(piece: choices.Piece) -> object:
    """Return a value that is equal for all pieces of one item."""
    return piece.number if isinstance(piece, choices.Call) else type(piece)


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def _delta_template(item: dict[str, Any], place: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before the text, between text and number, and after the number of each delta."""
    text, number = _MARKS
    name, _, other_fields = _TEXT_EVENTS[item["type"]]
    event = sse.typed_event(
        {
            "type": f"response.{name}.delta",
            **place,
            "delta": text,
            **other_fields,
            "sequence_number": number,
        }
    )
    head, _, rest = event.partition(sse.encode(text))
    middle, _, tail = rest.partition(sse.encode(number))
    return head, middle, tail


def _usage(usage: sse.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens
        },
        "total_tokens": usage.total_tokens,
    }


def _fixed_fields(
    request: responses_request.ResponsesRequest, answer_identity: sse.Identity
) -> dict[str, Any]:
    """Return the fields that are known before the answer: mostly those of the request."""
    text = request.text or responses_request.TextOptions()
    retention = request.prompt_cache_retention
    described = {"type": "text"} if text.format is None else msgspec.to_builtins(text.format)
    shown = {key: value for key, value in described.items() if value is not None}
    verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
    sampling = answer_identity.sampling
    return {
        "object": "response",
        "created_at": answer_identity.created,
        "model": answer_identity.model,
        "background": False,
        "conversation": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt": None,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": retention.replace("-", "_") if retention else None,
        "reasoning": {"effort": request.effort, "summary": request.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.is_stored,
        "temperature": sampling.temperature,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": shown, **verbosity},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_TOOL_DEFAULTS.get(tool["type"], {}) | tool for tool in request.tools or ()],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
