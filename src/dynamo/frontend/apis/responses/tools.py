"""The tools of a request of the Responses API: functions, custom tools, and namespaces of both.

A conversation has no namespaces, so the model knows a tool in one by its name alone. Where several tools have that
name, as those of two MCP servers may, it knows each by namespace and name; calls are told as the client named them.
"""  # decider

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.preprocess import conversation, inputs
from dynamo.runtime.http import json_body

DISPENSABLE_TOOLS = ("web_search", "web_search_preview", "local_shell", "tool_search")
_UNUSUAL = re.compile(r"[^\w-]", re.ASCII)
_ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=conversation.MAX_TOOL_NAME)]


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs with a text."""

    type: Literal["custom"]
    name: _ToolName
    description: str | None = None
    format: inputs.Hint = None
    defer_loading: inputs.Hint = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs with an object."""

    type: Literal["function"]
    name: _ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # official clients always send true; without effect
    defer_loading: inputs.Hint = None


class ClientTool(NamedTuple):
    """A tool as the client named it; `namespace` None: in none."""

    name: str
    namespace: str | None
    is_custom: bool


_function_decoder = json_body.RequestDecoder(FunctionTool)
_custom_decoder = json_body.RequestDecoder(CustomTool)


def convert_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools in the form of chat completions. Raises InvalidRequest.

    Tools that the model may do without are left out and noted as ignored: coding agents send them unasked.
    """
    converted: list[tuple[Any, dict[str, Any]]] = []  # each behind its namespace
    for number, tool in enumerate(tools):
        place, kind = f"tools[{number}]", tool.get("type")
        ignored = json_body.ignored_names.get()
        if kind == "namespace" and isinstance(inner := tool.get("tools"), list):
            converted += [
                (tool.get("name"), _convert_tool(one, f"{place}.tools[{index}]"))
                for index, one in enumerate(inner)
            ]
        elif kind in DISPENSABLE_TOOLS and ignored is not None:
            ignored.append(f"{place}.{kind}")
        else:
            converted.append((None, _convert_tool(tool, place)))
    if len(converted) > inputs.MAX_TOOLS:
        raise errors.InvalidRequest.of_param(
            "tools", f"expected at most {inputs.MAX_TOOLS} with those in namespaces, got more"
        )
    described = [(namespace, tool[tool["type"]]) for namespace, tool in converted]
    known_names = _name_tools([(namespace, tool["name"]) for namespace, tool in described])
    for (_, tool), name in zip(described, known_names, strict=True):
        tool["name"] = name
    return [tool for _, tool in converted]


def map_tools(tools: list[dict[str, Any]]) -> Mapping[str, ClientTool]:
    """Return the tools, which `convert_tools` has taken, by the names under which the model knows them."""
    listed: list[tuple[Any, dict[str, Any]]] = []
    for tool in tools:
        if tool["type"] == "namespace":
            listed += [(tool.get("name"), inner) for inner in tool["tools"]]
        elif tool["type"] in ("function", "custom"):
            listed.append((None, tool))
    known_names = _name_tools([(namespace, tool["name"]) for namespace, tool in listed])
    return {
        name: ClientTool(
            tool["name"],
            namespace if isinstance(namespace, str) else None,
            tool["type"] == "custom",
        )
        for name, (namespace, tool) in zip(known_names, listed, strict=True)
    }


def list_renamed(tools: list[dict[str, Any]]) -> Mapping[tuple[str, str], str]:
    """Return the name by which the model knows a tool, by namespace and name, where it is another one."""
    return {
        (tool.namespace, tool.name): name
        for name, tool in map_tools(tools).items()
        if tool.namespace is not None and tool.name != name
    }


def _name_tools(places: Sequence[tuple[Any, str]]) -> list[str]:
    """Return the name by which the model knows each of these tools, which are namespace and name."""
    counts = collections.Counter(name for _, name in places)
    return [
        name
        if counts[name] == 1 or not isinstance(namespace, str)
        else f"{_UNUSUAL.sub('_', namespace)}__{name}"
        for namespace, name in places
    ]


def _convert_tool(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.InvalidRequest.of_param(
            place, f"expected an object, got {json_body.describe(value)}"
        )
    if value.get("type") == "custom":
        custom: CustomTool = _custom_decoder.convert(value, place)
        described = {"description": custom.description, "format": custom.format}
        return {"type": "custom", "custom": {"name": custom.name, **described}}
    if value.get("type") != "function":
        raise errors.InvalidRequest.of_param(
            f"{place}.type",
            "tools that the server runs are not supported; expected 'function' or 'custom', got "
            + json_body.describe(value.get("type")),
        )
    tool: FunctionTool = _function_decoder.convert(value, place)
    function = {"name": tool.name, "parameters": tool.parameters or {}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
