"""What Anthropic's API answers, as types: for the description of our API, like `openai_answers`."""

from typing import Any, Literal

import msgspec


class MessageUsage(msgspec.Struct, kw_only=True):
    """What it cost."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(msgspec.Struct, kw_only=True):
    """Text, a thought or the use of a tool; what else it has depends on its type."""

    type: Literal["text", "thinking", "tool_use"]


class MessageAnswer(msgspec.Struct, kw_only=True):
    """What the model said."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The data of an event of a streamed message; what else it has depends on its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
        "ping",
    ]
    delta: dict[str, Any] = {}
