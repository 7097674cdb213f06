"""The tools of a messages request, and as those of a chat request."""

from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.protocols import anthropic, openai_chat, openai_decode, openai_guided


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One that the client runs."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: anthropic.CacheControl | None = None
    eager_input_streaming: bool | None = None
    strict: bool | None = None


_tool = openai_decode.RequestDecoder(Tool)


def chat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tools, as a chat has them. Raises InvalidRequest."""
    if len(tools) > openai_chat.MAX_TOOLS:
        raise errors.InvalidRequest(
            f"tools: expected at most {openai_chat.MAX_TOOLS}, got {len(tools)}", param="tools"
        )
    return [_chat_one(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def choice(
    asked: anthropic.ToolChoice | None,
) -> Literal["none", "auto", "required"] | openai_guided.NamedTool | None:
    """The same choice, as a chat has it."""
    match asked:
        case None:
            return None
        case anthropic.ToolChoice(type="any"):
            return "required"
        case anthropic.ToolChoice(type="tool", name=str(name)):
            function = openai_guided.Function(name=name)
            return openai_guided.NamedTool(type="function", function=function)
        case anthropic.ToolChoice(type="none"):
            return "none"
        case _:
            return "auto"


def _chat_one(value: dict[str, Any], place: str) -> dict[str, Any]:
    kind = value.get("type", "custom")
    if kind not in ("custom", None):
        raise errors.InvalidRequest(
            f"{place}.type: tools that the server runs are not supported; expected 'custom', got "
            + openai_decode.describe(kind),
            param=f"{place}.type",
        )
    tool = _tool.convert(value, place)
    if tool.strict:
        raise errors.InvalidRequest(
            f"{place}.strict: not supported; expected false or nothing, got true",
            param=f"{place}.strict",
        )
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
