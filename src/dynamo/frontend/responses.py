"""OpenAI's Responses API: a chat whose earlier turns the server may remember."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from dynamo.base import errors
from dynamo.frontend import apis
from dynamo.frontend.answer import delivery, response_shape, sse, typed_delivery
from dynamo.frontend.processes import response_store
from dynamo.preprocess import preprocessor
from dynamo.protocols import (
    model_errors,
    openai_chat,
    openai_errors,
    openai_items,
    openai_responses,
)
from dynamo.runtime.http import exchange

PATH = "/v1/responses/"
_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode


class Turn(openai_chat.ChatRequest, frozen=True, kw_only=True):
    """The chat request that asks the same."""

    asked: openai_responses.ResponsesRequest
    conversation: list[
        dict[str, Any]
    ]  # `messages` without the instructions, which are for this turn only

    @property
    def format_param(self) -> str:
        return "text.format"

    @property
    def effort_param(self) -> str:
        return "reasoning.effort"


class Responses:
    """The API, and the answers that are kept."""

    def __init__(self, store: response_store.ResponseStore) -> None:
        self._store = store
        self.api = apis.Api(
            endpoint="responses",
            decode=self._decode,
            prepare=_prepare,
            shape=lambda turn, who: response_shape.ResponseShape(
                turn.asked,
                who.request_id,
                who.created,
                who.model,
                lambda response: self._keep(turn, response),
            ),
            stream=typed_delivery.TypedDelivery,
        )

    def read_prompt(self, body: bytes) -> openai_chat.ChatRequest:
        """The chat request that has the prompt of this request to count tokens. Raises RequestError."""
        prompted = openai_responses.decode_count(body)
        messages = [*_instructions(prompted), *self._conversation(prompted)]
        return openai_chat.ChatRequest(
            model=prompted.model,
            messages=messages,
            tools=openai_items.tools(prompted.tools or []),
            tool_choice=prompted.chat_tool_choice,
            reasoning_effort=prompted.effort,
        )

    def show(self, caller: exchange.Exchange) -> None:
        """`GET /v1/responses/{id}`."""
        asked = [name for name, value in parse_qsl(caller.request.query) if value != "false"]
        if asked:
            error = errors.InvalidRequest(
                f"{asked[0]}: not supported; leave it out", param=asked[0]
            )
            delivery.respond_error(caller, error)
            return
        kept = self._store.find(_id_in(caller))
        if kept is None:
            _respond_unknown(caller)
        else:
            caller.respond(200, kept.response)

    def delete(self, caller: exchange.Exchange) -> None:
        """`DELETE /v1/responses/{id}`."""
        response_id = _id_in(caller)
        if self._store.remove(response_id):
            body = {"id": response_id, "object": "response", "deleted": True}
            caller.respond(200, sse.encode(body))
        else:
            _respond_unknown(caller)

    def _decode(self, body: bytes) -> Turn:
        asked = openai_responses.decode(body)
        conversation = self._conversation(asked)
        return Turn(
            asked=asked,
            conversation=conversation,
            model=asked.model,
            messages=[*_instructions(asked), *conversation],
            max_completion_tokens=asked.max_output_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=asked.stream,
            tools=openai_items.tools(asked.tools or []),
            tool_choice=asked.chat_tool_choice,
            response_format=asked.chat_format,
            reasoning_effort=asked.effort,
            parallel_tool_calls=asked.parallel_tool_calls,
        )

    def _conversation(self, prompted: openai_responses.Prompted) -> list[dict[str, Any]]:
        """What was said before, and what is said now."""
        new = openai_items.messages(prompted.input)
        if prompted.previous_response_id is None:
            return new
        kept = self._store.find(prompted.previous_response_id)
        if kept is None:
            raise model_errors.ResponseNotFound(
                f"Previous response with id {prompted.previous_response_id[:100]!r} not found: answers are kept "
                "for a limited time, unless store is false",
                param="previous_response_id",
            )
        return [*_decode_messages(kept.conversation), *new]

    def _keep(self, turn: Turn, response: dict[str, Any]) -> None:
        if not turn.asked.is_kept:
            return
        conversation = [*turn.conversation, *openai_items.messages(response["output"])]
        self._store.put(
            response["id"],
            response_store.StoredResponse(sse.encode(response), sse.encode(conversation)),
        )


async def _prepare(
    preparer: preprocessor.Preprocessor, turn: Turn, request_id: str
) -> Sequence[preprocessor.Prepared]:
    return (await preparer.chat(turn, request_id, param="input"),)


def _instructions(prompted: openai_responses.Prompted) -> list[dict[str, Any]]:
    if prompted.instructions is None:
        return []
    return [{"role": "system", "content": prompted.instructions}]


def _id_in(caller: exchange.Exchange) -> str:
    return caller.request.path.removeprefix(PATH)


def _respond_unknown(caller: exchange.Exchange) -> None:
    message = f"Response with id {_id_in(caller)[:100]!r} not found."
    caller.respond(404, openai_errors.encode(message, type="invalid_request_error"))
