"""OpenAI's chat: `POST /v1/chat/completions`, its requests and its answers, as chunks of a stream or one body.

A chunk that carries only content is a template, `head + JSON of the text + tail`, made once per choice; everything
rarer (reasoning, tool calls, log probabilities) is encoded as it comes. So answers are not made from the types that
describe them; a test of the description keeps both in step. Fields may be added, so clients have to accept more.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import error_dialects, openapi
from dynamo.frontend.apis.operation import GENERATION_ERRORS, HELLO, Operation, RequestHandlers
from dynamo.frontend.delivery import choices, sse, streaming
from dynamo.preprocess import conversation, inputs, options, preprocessor
from dynamo.preprocess.parsers import parser
from dynamo.runtime.http import json_body

MAX_ECHOED_CHARS = 2**24


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer that the caller expects. It may save time and never changes the answer."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(inputs.Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation, with the fields that only OpenAI's chat has."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    echo: bool | None = None  # vLLM's: the answer begins with the assistant's last message
    # without effect
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    safety_identifier: inputs.Hint = None
    prompt_cache_key: inputs.Hint = None
    prompt_cache_options: inputs.Hint = None
    # refused, unless they ask for nothing
    audio: None = None
    web_search_options: None = None
    functions: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    moderation: None = None

    @property
    def echoed_message(self) -> str:
        """The text of the last message, if the answer is to begin with it because both have one role."""
        if not self.echo:
            return ""
        last = self.messages[-1] if self.messages else {}
        is_same = last.get("role") == "assistant" or self.add_generation_prompt is False
        return conversation.text_of(last.get("content")) if is_same else ""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise errors.InvalidRequest.of_param(
                "top_logprobs", "only allowed when logprobs is true"
            )
        num_echoed = self.num_choices * len(self.echoed_message) if self.echo else 0
        if num_echoed > MAX_ECHOED_CHARS:
            raise errors.InvalidRequest.of_param(
                "echo",
                f"expected at most {MAX_ECHOED_CHARS} echoed characters in all answers together, got {num_echoed}: "
                "ask for fewer answers, or leave it out",
            )


decode = json_body.RequestDecoder(ChatRequest).decode


_SERVICE_TIER = "default"
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatAlternative(msgspec.Struct, kw_only=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatAlternative, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice."""

    content: list[ChatToken] | None
    refusal: None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str  # JSON


class CalledCustomTool(msgspec.Struct, kw_only=True):
    """The custom tool of a tool call."""

    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call of the model, with the key that its type names."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None
    tool_calls: list[ToolCall]
    annotations: list[dict[str, Any]]
    audio: None


class ChatChoice(sse.ChoiceFields, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: sse.Usage
    system_fingerprint: str | None
    service_tier: Literal["default"]
    prompt_token_ids: sse.TokenIds = msgspec.UNSET
    prompt_logprobs: sse.PromptLogprobs = msgspec.UNSET
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # as `nvext.extra_fields` names them


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The name of the function in the first delta of a call, and a part of its arguments in each."""

    name: str = ""
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a tool call; the first one of each call has its id and type. Calls of custom tools come whole."""

    index: int
    id: str = ""
    type: Literal["function", "custom", ""] = ""
    function: FunctionDelta | None = None
    custom: CalledCustomTool | None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of the message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(sse.ChoiceFields, kw_only=True):
    """A piece of one of the `n` answers."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """The data of an event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: sse.Usage | None = None
    service_tier: Literal["default"] | msgspec.UnsetType = msgspec.UNSET  # where one was named
    prompt_token_ids: sse.TokenIds = msgspec.UNSET
    nvext: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatFormatter:
    """Formats the answer to one request."""

    def __init__(
        self,
        request: ChatRequest,
        answer_identity: sse.Identity,
        reasoning_field: str = "reasoning_content",
    ) -> None:
        """`reasoning_field` is the name of the field with the thoughts of the model."""
        self._identity = answer_identity
        self._reasoning_field = reasoning_field
        # in chunks the tier that served the request is for clients that chose one
        self._tier = {} if request.service_tier is None else {"service_tier": _SERVICE_TIER}
        self._token_names = answer_identity.token_names(by_id=request.return_tokens_as_token_ids)
        self._custom_tools: frozenset[str] = request.custom_tools if request.tools else frozenset()
        self._hides_reasoning = request.include_reasoning is False
        self._echo = request.echoed_message

    def chunk(self, part: sse.ChoicePart) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if part.is_first else {}
        choice = {
            "index": part.index,
            "delta": self._echoed(delta | self._delta(part.piece), is_first=part.is_first),
            "logprobs": self._logprobs(part.reports),
            "finish_reason": part.finish_reason,
            **sse.choice_fields(part),
        }
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | sse.prompt_fields(part, self._token_names.token_text)

    def usage_chunk(self, usage: sse.Usage) -> dict[str, Any]:
        return {**self._object("chat.completion.chunk", []), "usage": usage}

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        rows = [
            {
                "index": answer.index,
                "message": self._message(answer.pieces),
                "logprobs": self._logprobs(answer.reports),
                "finish_reason": answer.finish_reason,
                **sse.choice_fields(answer),
            }
            for answer in answers
        ]
        of_prompt = sse.prompt_fields(answers[0], self._token_names.token_text)
        head = self._object("chat.completion", rows)
        return {**head, "service_tier": _SERVICE_TIER, "usage": usage, **of_prompt}

    def _object(self, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._identity.head("chatcmpl-", kind), **self._tier, "choices": rows}

    def _logprobs(self, reports: Sequence[choices.TokenReport] | None) -> dict[str, Any] | None:
        if reports is None:
            return None
        content = [
            {
                **self._token(report.token_id, report.logprobs.logprob),
                "top_logprobs": [
                    self._token(top.token_id, top.logprob) for top in report.logprobs.top
                ],
            }
            for report in reports
            if report.logprobs is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_names.token_bytes(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": sse.finite(logprob),
            "bytes": list(data),
        }

    def _delta(self, piece: choices.Piece | None) -> dict[str, Any]:
        match piece:
            case str():
                return {"content": piece}
            case parser.Reasoning(text) if not self._hides_reasoning:
                return {self._reasoning_field: text}
            case choices.Call():
                part = (
                    self._call(piece)
                    if piece.is_start
                    else {"function": {"arguments": piece.arguments}}
                )
                return {"tool_calls": [{"index": piece.number, **part}]}
            case _:
                return {}

    def _echoed(self, delta: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        """Return the delta, behind the echoed message if it is the first one."""
        if not (is_first and self._echo):
            return delta
        return {**delta, "content": self._echo + delta.get("content", "")}

    def _message(self, pieces: Sequence[choices.Piece]) -> dict[str, Any]:
        """Return the message with all keys that clients of OpenAI and vLLM read, empty where there is nothing.

        `function_call` is the exception: OpenAI leaves it out, and its schema does not allow null there.
        """
        content, reasoning = self._echo, ""
        calls = []
        for piece in pieces:
            match piece:
                case str():
                    content += piece
                case parser.Reasoning(text) if not self._hides_reasoning:
                    reasoning += text
                case choices.Call():
                    calls.append(self._call(piece))
        return {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
            self._reasoning_field: reasoning or None,
            "tool_calls": calls,
            "annotations": [],
            "audio": None,
        }

    def _call(self, call: choices.Call) -> dict[str, Any]:
        if call.name in self._custom_tools:
            custom = {"name": call.name, "input": conversation.custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}


async def prepare(
    preparer: preprocessor.Preprocessor,
    chat: inputs.Conversation,
    request_id: str,
    param: str = "messages",
) -> Sequence[preprocessor.Prepared]:
    """Prepare the one prompt of a conversation, which the field `param` holds. Raises RequestError."""
    prepared = await preparer.prepare_conversation(chat, request_id, param=param)
    num_copies = chat.num_drawn if chat.stream else 1  # each choice of a stream begins with it
    options.check_repeated(chat, num_copies * prepared.request.prompt_len)
    return (prepared,)


def operations(handlers: RequestHandlers, reasoning_field: str) -> Sequence[Operation]:
    """Return the operations of this API; `reasoning_field` is the name under which answers have their thoughts."""
    api = pipeline.GenerationApi(
        endpoint="chat_completions",
        decode=decode,
        prepare=prepare,
        make_formatter=functools.partial(ChatFormatter, reasoning_field=reasoning_field),
        stream=streaming.StreamDelivery,
        dialect=error_dialects.OPENAI,
    )
    return (
        Operation(
            method="POST",
            path="/v1/chat/completions",
            handler=handlers.generate(api),
            summary="Answer a conversation, as OpenAI's chat does",
            tag="OpenAI",
            request=ChatRequest,
            request_details={
                "messages": openapi.MESSAGES,
                "tools": openapi.or_null(openapi.TOOLS),
                "logit_bias": openapi.LOGIT_BIAS,
            },
            request_rules=(openapi.LOGPROBS_RULE, openapi.FORMAT_RULE),
            answer=ChatCompletion,
            events=ChatChunk,
            ends_with_done=True,
            errors=GENERATION_ERRORS,
            example={"messages": HELLO, "max_tokens": 60},
        ),
    )
