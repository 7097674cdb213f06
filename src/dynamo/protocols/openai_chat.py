"""`POST /v1/chat/completions`: the request, as it came.

Messages and tools stay dictionaries, because a chat template walks through them.
"""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode, openai_fields, openai_guided, openai_messages

MAX_TOOLS = 128
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the caller believes the answer to be. It may save time, and never changes the answer."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(
    openai_fields.GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One turn of a conversation."""

    messages: openai_messages.Messages
    max_completion_tokens: openai_fields.Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | openai_guided.NamedTool | None = None
    response_format: openai_guided.ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Literal["medium"] | None = None
    prediction: Prediction | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # beyond OpenAI
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    # refused, unless they ask for nothing
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    prompt_cache_retention: None = None
    prompt_cache_options: None = None
    moderation: None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token; None: no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort_param(self) -> str:
        """What the effort came in."""
        return "reasoning_effort"

    @property
    def must_limit_thinking(self) -> bool:
        """Is a limit to thinking that cannot be held an error?"""
        return True

    @property
    def allows_calls(self) -> bool:
        """May the answer call tools?"""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Must the answer call a tool?"""
        return self.tool_choice == "required" or self.forced_tool is not None

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that must be called."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, openai_guided.NamedTool) else None

    @property
    def format_param(self) -> str:
        """What the caller calls the shape of the answer."""
        return "response_format"

    @property
    def template_args(self) -> dict[str, Any]:
        """What the caller tells the template, from either field."""
        return {**(self.chat_template_kwargs or {}), **(self.chat_template_args or {})}

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        super().check()
        openai_messages.check(self.messages)
        if self.tools:
            openai_messages.check_tools(self.tools)
        if self.response_format is not None:
            self.response_format.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise errors.InvalidRequest(
                "top_logprobs: only allowed when logprobs is true", param="top_logprobs"
            )


_decoder = openai_decode.RequestDecoder(ChatRequest)


def decode(body: bytes) -> ChatRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request
