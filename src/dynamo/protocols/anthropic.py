"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`: the requests, as they came.

As with OpenAI's, a parameter is honoured, or refused by name, or documented as without effect (docs/api.md).
"""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import openai_decode, openai_fields, openai_guided, openai_messages

MAX_STOP_SEQUENCES = 64
StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish to cache the prompt up to here. Without effect: every prefix is cached that there is memory for."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. Blocks are looked at one by one (`anthropic_blocks`)."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """About the caller."""

    user_id: str | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it speaks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**31 - 1)] | None = None
    # refused, unless it asks for nothing
    display: None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the answer shall be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may call a tool, and whether more than one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt; all of a request to count tokens."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(max_length=openai_messages.MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    # refused, unless they ask for nothing
    context_management: None = None
    mcp_servers: None = None

    @property
    def is_thinking(self) -> bool:
        """Shall the model think, and tell its thoughts? As with Anthropic, only if they ask for it."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def chat_format(self) -> openai_guided.ResponseFormat | None:
        """`output_config.format`, as a chat has it."""
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = openai_guided.JsonSchema(name="output", schema=self.output_config.format.schema)
        return openai_guided.ResponseFormat(type="json_schema", json_schema=schema)

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise errors.InvalidRequest(
                "tool_choice.name: expected with type tool, and with no other",
                param="tool_choice.name",
            )
        if not self.messages:
            raise errors.InvalidRequest(
                "messages: expected at least one, got an empty list", param="messages"
            )
        if self.messages[-1].role == "assistant":
            raise errors.InvalidRequest(
                "messages: the last one is the assistant's; to continue its beginning (prefill) is not "
                "supported: end with the user's",
                param="messages",
            )


class MessageRequest(Conversation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_tokens: openai_fields.Length
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: openai_fields.Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # refused, unless they ask for nothing
    container: None = None
    inference_geo: None = None
    speed: None = None
    diagnostics: None = None
    user_profile_id: None = None
    workspace_id: None = None

    def check(self) -> None:
        """What the types cannot say. Raises InvalidRequest."""
        super().check()
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return
        if thinking.budget_tokens is None:
            raise errors.InvalidRequest(
                "thinking.budget_tokens: required, but missing", param="thinking.budget_tokens"
            )
        if thinking.budget_tokens >= self.max_tokens:
            raise errors.InvalidRequest(
                f"thinking.budget_tokens: expected less than max_tokens, which is {self.max_tokens}, "
                f"got {thinking.budget_tokens}",
                param="thinking.budget_tokens",
            )


_requests = openai_decode.RequestDecoder(MessageRequest)
_conversations = openai_decode.RequestDecoder(Conversation)


def decode(body: bytes) -> MessageRequest:
    """The request in this body. Raises InvalidRequest, which names the field."""
    request = _requests.decode(body)
    request.check()
    return request


def decode_count(body: bytes) -> Conversation:
    """The request to count tokens in this body. Raises InvalidRequest, which names the field."""
    conversation = _conversations.decode(body)
    conversation.check()
    return conversation
