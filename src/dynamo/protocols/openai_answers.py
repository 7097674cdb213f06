"""What OpenAI's API answers, as types: for the description of our API (`/openapi.json`).

Answers are made as bytes (templates, `frontend.*_shape`), not from these; the test that asks a frontend whatever the
description allows holds both together. Fields may be added, so clients have to be ready for more.
"""

from typing import Any, Literal

import msgspec

from dynamo.protocols import openai_usage

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class TopLogprob(msgspec.Struct, kw_only=True):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Of a choice."""

    content: list[TokenLogprob] | None
    refusal: None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Which function, with what."""

    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, kw_only=True):
    """The model calls a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of n."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: openai_usage.Usage
    system_fingerprint: str | None


class ToolCallDelta(ToolCall, kw_only=True):
    """A call, in one piece."""

    index: int


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of what the model says."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One of n."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """The data of an event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None
    usage: openai_usage.Usage | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Of a choice; the lists are of one length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of n for one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None  # null: the stream goes on


class Completion(msgspec.Struct, kw_only=True):
    """The answer to a completion, and the data of an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: openai_usage.Usage | None = None


class ResponseUsage(msgspec.Struct, kw_only=True):
    """What a response cost."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseItem(msgspec.Struct, kw_only=True):
    """A message, a thought or the call of a tool."""

    id: str
    type: Literal["message", "reasoning", "function_call"]


class Response(msgspec.Struct, kw_only=True):
    """The answer of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
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
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    store: bool


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The data of an event of a streamed response; what else it has depends on its type."""

    type: str
    sequence_number: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response is kept no more."""

    id: str
    object: Literal["response"]
    deleted: bool


class Model(msgspec.Struct, kw_only=True):
    """A model that can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: int


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: Literal["list"]
    data: list[Model]
