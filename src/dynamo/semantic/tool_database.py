"""The tools database: tools that requests get by what they ask for, in the file form of the original.

    [{"tool": {"type": "function", "function": {"name": …, …}}, "description": "words to compare with", …}, …]

A request with `tool_choice: "auto"` gets the most similar tools in place of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo.base import errors
from dynamo.semantic import config, similarity

MAX_BYTES = 2**22


class DatabaseTool(NamedTuple):
    """A tool that requests may get."""

    name: str
    description: str  # what requests are compared with
    definition: bytes  # the JSON that a request gets


class SelectedTools(NamedTuple):
    """The tools for a request: none are to be taken away, or `keeps` those of the request."""

    tools: tuple[DatabaseTool, ...] = ()
    keeps: bool = False
    missing: str = ""  # why nothing could be compared


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str = ""


class _Definition(msgspec.Struct, frozen=True):
    function: _Function


class _Entry(msgspec.Struct, frozen=True):
    tool: msgspec.Raw
    description: str = ""


def read_database(settings: config.ToolSettings, directory: Path | None) -> list[DatabaseTool]:
    """Return the tools in the file of a configuration, which may be beside it. Raises ConfigError."""
    if not settings.enabled:
        return []
    if not settings.tools_db_path:
        raise errors.ConfigError("tools.tools_db_path: expected the file of the tools, got none")
    path = config.find_file("tools.tools_db_path", settings.tools_db_path, directory)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise errors.ConfigError(f"{path}: expected at most {MAX_BYTES} bytes, got more")
        return [_read_tool(entry) for entry in msgspec.json.decode(data, type=list[_Entry])]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise errors.ConfigError(
            f"tools.tools_db_path: {path}: expected a list of tools in JSON: {error}"
        ) from error


def _read_tool(entry: _Entry) -> DatabaseTool:
    function = msgspec.json.decode(entry.tool, type=_Definition).function
    description = entry.description or function.description
    if not description:
        raise ValueError(f"the tool {function.name} has no description")
    return DatabaseTool(function.name, description, msgspec.json.format(entry.tool, indent=-1))


def select(
    tools: Sequence[DatabaseTool],
    settings: config.ToolSettings,
    threshold: float,
    vector: similarity.Vector | None,
    references: similarity.ReferenceVectors,
) -> SelectedTools:
    """Return the most similar tools that reach the threshold, the best one first.

    Where none does, the request goes without tools if `fallback_to_empty` is set, else with its own.
    """
    scores = (
        None
        if vector is None
        else references.similarities(vector, [tool.description for tool in tools])
    )
    if scores is None:
        keeps = not settings.fallback_to_empty
        return SelectedTools(keeps=keeps, missing="no embeddings, because no encoder answered")
    ranked = sorted(zip(scores, tools, strict=True), key=lambda pair: -pair[0])
    best = tuple(tool for score, tool in ranked[: settings.top_k] if score >= threshold)
    return SelectedTools(best, keeps=not best and not settings.fallback_to_empty)
