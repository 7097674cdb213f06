"""How the answer of the Responses API looks: the events of a stream, or one object.

Output is a row of items (`response_items`). In a stream one is open at a time, and a piece of another kind closes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.frontend.answer import choices, response_items, sse
from dynamo.protocols import openai_responses, openai_usage

_MARKS = ("\u0000", "\u0001")  # in the place of a text and of a number
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# by the type of the item: how the events of its text are called, what they call it, what else they say
_TEXT_EVENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("output_text", "text", {"logprobs": []}),
    "reasoning": ("reasoning_text", "text", {}),
    "function_call": ("function_call_arguments", "arguments", {}),
}
Keep = Callable[[dict[str, Any]], None]  # a complete response


@dataclass(slots=True)
class _Open:
    """The item that grows."""

    key: object  # what pieces belong to it
    item: dict[str, Any]
    place: dict[str, Any]
    delta: tuple[bytes, bytes, bytes]  # what stands around the text and the number of its deltas
    texts: list[str] = field(default_factory=list)


class ResponseShape:
    """The answer to one request; `keep` is called once, when it is complete."""

    def __init__(
        self,
        asked: openai_responses.ResponsesRequest,
        request_id: str,
        created: int,
        model: str,
        keep: Keep,
    ) -> None:
        self._digits = request_id.replace("-", "")
        self._keep = keep
        self._fixed = _fixed_fields(asked, created, model)
        self._items: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._num_events = 0

    def whole(
        self, answers: Sequence[sse.WholeChoice], usage: openai_usage.Usage
    ) -> dict[str, Any]:
        """The complete answer."""
        (answer,) = answers
        pieces = answer.pieces or ("",)
        last = len(pieces) - 1
        for number, piece in enumerate(pieces):
            status = _status(answer.finish_reason) if number == last else "completed"
            item = response_items.new(piece, number, self._digits)
            text = response_items.text_of(piece)
            self._items.append(response_items.complete(item, text, status))
        return self._complete(answer.finish_reason, usage)

    def begin(self, usage: openai_usage.Usage) -> bytes:
        """The response without its output."""
        del usage
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: choices.Piece) -> bytes:
        """A delta of the open item; before it the start of a new one, if need be."""
        events = b""
        if self._open is None or self._open.key != _key(piece):
            events, self._open = self._start(piece)
        text = response_items.text_of(piece)
        self._open.texts.append(text)
        number, self._num_events = self._num_events, self._num_events + 1
        head, middle, tail = self._open.delta
        return b"%b%b%b%b%d%b" % (events, head, sse.encode(text), middle, number, tail)

    def end(self, finish_reason: str, stop_string: str | None, usage: openai_usage.Usage) -> bytes:
        """Close item and response."""
        del stop_string
        events = b""
        if self._open is None:
            events, self._open = self._start("")
        events += self._close(_status(finish_reason))
        response = self._complete(finish_reason, usage)
        return events + self._event(f"response.{response['status']}", response=response)

    def error(self, error: errors.DynamoError) -> bytes:
        """The response has failed, with what it has said."""
        items = [*self._items]
        if self._open is not None:
            text = "".join(self._open.texts)
            items.append(response_items.complete(self._open.item, text, "incomplete"))
        failed = self._response("failed", items, None)
        failed["error"] = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=failed)

    def _start(self, piece: choices.Piece) -> tuple[bytes, _Open]:
        """The events that begin an item for this piece."""
        events = self._close("completed")
        number = len(self._items)
        item = response_items.new(piece, number, self._digits)
        place = {"item_id": item["id"], "output_index": number}
        events += self._event("response.output_item.added", output_index=number, item=item)
        if "content" in item:
            place["content_index"] = 0
            part = response_items.part(item, "")
            events += self._event("response.content_part.added", **place, part=part)
        return events, _Open(_key(piece), item, place, _delta_template(item, place))

    def _close(self, status: str) -> bytes:
        """The events that end the open item, if there is one."""
        if self._open is None:
            return b""
        item, place, text = self._open.item, self._open.place, "".join(self._open.texts)
        self._open = None
        done = response_items.complete(item, text, status)
        self._items.append(done)
        name, key, more = _TEXT_EVENTS[item["type"]]
        events = self._event(f"response.{name}.done", **place, **{key: text}, **more)
        if "content" in item:
            part = done["content"][0]
            events += self._event("response.content_part.done", **place, part=part)
        number = place["output_index"]
        return events + self._event("response.output_item.done", output_index=number, item=done)

    def _complete(self, finish_reason: str, usage: openai_usage.Usage) -> dict[str, Any]:
        response = self._response(_status(finish_reason), self._items, _usage(usage))
        reason = _INCOMPLETE.get(finish_reason)
        response["incomplete_details"] = {"reason": reason} if reason else None
        self._keep(response)
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
            **self._fixed,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return sse.typed_event({"type": kind, **fields, "sequence_number": number})


def _key(piece: choices.Piece) -> object:
    """The same for pieces of one item."""
    return piece.number if isinstance(piece, choices.Call) else type(piece)


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def _delta_template(item: dict[str, Any], place: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """What stands around the text and the number of each delta."""
    text, number = _MARKS
    name, _, more = _TEXT_EVENTS[item["type"]]
    event = sse.typed_event(
        {
            "type": f"response.{name}.delta",
            **place,
            "delta": text,
            **more,
            "sequence_number": number,
        }
    )
    head, _, rest = event.partition(sse.encode(text))
    middle, _, tail = rest.partition(sse.encode(number))
    return head, middle, tail


def _usage(usage: openai_usage.Usage) -> dict[str, Any]:
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
    asked: openai_responses.ResponsesRequest, created: int, model: str
) -> dict[str, Any]:
    """What is known before the answer: mostly what was asked."""
    return {
        "object": "response",
        "created_at": created,
        "model": model,
        "background": False,
        "conversation": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.effort, "summary": None} if asked.effort else None,
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.is_kept,
        "temperature": asked.temperature,
        "text": {"format": _text_format(asked)},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": 0,
        "top_p": asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


def _text_format(asked: openai_responses.ResponsesRequest) -> dict[str, Any]:
    """As it was asked for."""
    form = asked.text.format if asked.text is not None else None
    told = {"type": "text"} if form is None else msgspec.to_builtins(form)
    return {name: value for name, value in told.items() if value is not None}
