"""From what an answer must look like to what libraries take, in vLLM's words; the others' adapters rename them.

A plain shape has a field of its own there. Thoughts before an answer, calls of tools, and either of two are put
together as a structural tag, in which XGrammar (the default of all) composes shapes (`xgrammar.structural_tag`).
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.protocols import generate


class Ability(NamedTuple):
    """How this library, as it was started, holds answers to shapes."""

    backend: str = "auto"  # what compiles shapes, as the library's flags name it
    has_reasoner: bool = False  # it lets a model think by itself, and holds it to the rest
    has_choice: bool = True  # one of several texts has a field of its own


def fields(guided: generate.GuidedDecoding, ability: Ability) -> dict[str, Any]:
    """One of json, regex, choice, grammar and structural_tag. Raises InvalidRequest."""
    if guided.backend not in (None, "auto", ability.backend):
        raise errors.InvalidRequest(
            f"guided_decoding_backend: expected auto or {ability.backend}, with which the engine was started,"
            f" got {guided.backend!r}",
            param="guided_decoding_backend",
        )
    thoughts = None if ability.has_reasoner else guided.thoughts
    is_composed = guided.choice is not None and not ability.has_choice
    if thoughts is not None or guided.calls is not None or is_composed:
        tag = {"type": "structural_tag", "format": _whole(guided, thoughts)}
        return {"structural_tag": json.dumps(tag)}
    return {
        "json": guided.json,
        "regex": guided.regex,
        "choice": list(guided.choice) if guided.choice is not None else None,
        "grammar": guided.grammar,
    }


def _whole(
    guided: generate.GuidedDecoding, thoughts: generate.GuidedReasoning | None
) -> dict[str, Any]:
    shapes = [_calls(guided, guided.calls)] if guided.calls is not None else []
    if any((guided.json, guided.regex, guided.choice, guided.grammar)):
        shapes.append(_text(guided))
    answer = _either(shapes)
    if thoughts is None:
        return answer
    whole = [
        {"type": "sequence", "elements": [_thought(begin, thoughts), answer]}
        for begin in thoughts.opens or ("",)
    ]
    return _either([*whole, answer] if thoughts.opens else whole)


def _thought(begin: str, thoughts: generate.GuidedReasoning) -> dict[str, Any]:
    return _tag(begin, {"type": "any_text"}, list(thoughts.closes))


def _text(guided: generate.GuidedDecoding) -> dict[str, Any]:
    if guided.json is not None:
        return _schema(guided, guided.json)
    if guided.regex is not None:
        return {"type": "regex", "pattern": guided.regex}
    if guided.choice is not None:
        return _either([{"type": "const_string", "value": one} for one in guided.choice])
    return {"type": "grammar", "grammar": guided.grammar}


def _calls(guided: generate.GuidedDecoding, calls: generate.GuidedToolCalls) -> dict[str, Any]:
    """Its bound on the number of calls is one, or none: XGrammar cannot count further."""
    each = [
        _tag(
            f'{{"name": {json.dumps(tool.name)}, "arguments": ',
            _schema(guided, tool.parameters),
            "}",
        )
        for tool in calls.tools
    ]
    several = {
        "type": "tags_with_separator",
        "tags": each,
        "separator": calls.between,
        "at_least_one": True,
        "stop_after_first": calls.max_calls == 1,
    }
    return _tag(calls.begin, several, calls.end)


def _tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(guided: generate.GuidedDecoding, text: str) -> dict[str, Any]:
    try:
        return {"type": "json_schema", "json_schema": json.loads(text)}
    except ValueError as error:
        raise errors.InvalidRequest(
            f"{guided.param}: expected a JSON schema: {error}", param=guided.param
        ) from error


def _either(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return shapes[0] if len(shapes) == 1 else {"type": "or", "elements": list(shapes)}
