"""The content blocks of Anthropic's messages, and the text or parts of a conversation that they become."""  # decider

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation, images, inputs
from dynamo.runtime.http import json_body

Content = str | list[dict[str, Any]]  # of a message of a conversation: parts only with images


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to cache the prompt up to here; the longest time to live of a request is that of its whole prompt."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every content block."""

    cache_control: CacheControl | None = None


class TextBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text of any role."""

    type: Literal["text"]
    text: str
    citations: inputs.Hint = None


class ImageSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of an image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image of the user, or of the result of a tool."""

    type: Literal["image"]
    source: ImageSource

    def to_part(self, place: str) -> dict[str, Any]:
        url = images.data_url(self.source.media_type, self.source.data)
        return images.make_part(url, f"{place}.source")


class ToolUseBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: inputs.Hint = None


class ToolResultBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client's search has found, in the result of that search."""

    type: Literal["tool_reference"]
    tool_name: Annotated[str, msgspec.Meta(min_length=1, max_length=conversation.MAX_TOOL_NAME)]

    @property
    def text(self) -> str:
        """The name alone: the model was shown all tools."""
        return self.tool_name


class ThinkingBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A thought of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An encrypted thought, which is skipped: none of our models wrote it."""

    type: Literal["redacted_thinking"]
    data: str


BLOCK_TYPES: dict[str, type[Block]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "tool_reference": ToolReferenceBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
_DECODERS: dict[str, json_body.RequestDecoder[Any]] = {
    name: json_body.RequestDecoder(kind) for name, kind in BLOCK_TYPES.items()
}


def decode(content: str | list[dict[str, Any]], place: str, types: tuple[str, ...]) -> list[Block]:
    """Return the blocks of this content, each of one of these types; a plain text is one block."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    blocks = []
    for number, block in enumerate(content):
        block_place = f"{place}[{number}]"
        kind = block.get("type")
        if kind not in types:
            expected = ", ".join(map(repr, types))
            got = f"got {kind!r:.60}" if "type" in block else "but it is missing"
            raise errors.InvalidRequest.of_param(
                f"{block_place}.type", f"expected one of {expected}, {got}"
            )
        blocks.append(_DECODERS[kind].convert(block, block_place))
    return blocks


def convert(blocks: list[Block], place: str) -> Content:
    """Return the text of these blocks, or, with images, their parts in order."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return join_texts(blocks)
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            parts.append(block.to_part(f"{place}[{number}]"))
        elif isinstance(block, TextBlock | ToolReferenceBlock):
            parts.append({"type": "text", "text": block.text})
    return parts


def join_contents(contents: Sequence[Content]) -> Content:
    """Return the contents of turns of one role in a row as that of one message; texts before any image become lines."""
    texts = cast(list[str], list(itertools.takewhile(lambda each: isinstance(each, str), contents)))
    rest = contents[len(texts) :]
    if not rest:
        return join_lines(texts)
    return [
        part
        for content in (*([join_lines(texts)] if texts else ()), *rest)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def join_texts(blocks: list[Block]) -> str:
    """Return the blocks with a text as lines."""
    return "\n".join(
        block.text for block in blocks if isinstance(block, TextBlock | ToolReferenceBlock)
    )


def join_lines(texts: Iterable[str]) -> str:
    """Return these texts as lines, without the empty ones."""
    return "\n".join(filter(None, texts))
