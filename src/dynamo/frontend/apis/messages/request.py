"""The requests of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`.

As with OpenAI's, a parameter is honoured, or refused by name, or documented as without effect (docs/api.md). Content
blocks and tools are decoded later, one by one (`conversation`), so that an error names the one that is wrong.
"""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation, inputs
from dynamo.runtime.http import json_body

MAX_STOP_SEQUENCES = 64
StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to cache the prompt up to here. Without effect: every prefix is cached while memory lasts."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CallerMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the caller."""

    user_id: str | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**31 - 1)] | None = None
    # refused, unless it asks for nothing
    display: None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schema of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolSelection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the model may call a tool, and whether more than one."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageCountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that make the prompt: the whole of a request to count tokens."""

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(max_length=conversation.MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    thinking: ThinkingConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolSelection | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    # refused, unless they ask for nothing
    context_management: None = None
    mcp_servers: None = None

    @property
    def is_thinking(self) -> bool:
        """True if the model thinks and the answer shows it; as with Anthropic, only on request."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
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


class MessageRequest(MessageCountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for an answer."""

    max_tokens: inputs.Length
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopSequence], msgspec.Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: inputs.Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: CallerMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # refused, unless they ask for nothing
    container: None = None
    inference_geo: None = None
    speed: None = None
    diagnostics: None = None
    user_profile_id: None = None
    workspace_id: None = None

    def check(self) -> None:
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


_request_decoder = json_body.RequestDecoder(MessageRequest)
_count_decoder = json_body.RequestDecoder(MessageCountRequest)


def decode(body: bytes) -> MessageRequest:
    """Return the request in this JSON body. Raises InvalidRequest, which names the field."""
    request = _request_decoder.decode(body)
    request.check()
    return request


def decode_count(body: bytes) -> MessageCountRequest:
    """Return the request to count tokens in this JSON body. Raises InvalidRequest, which names the field."""
    request = _count_decoder.decode(body)
    request.check()
    return request
