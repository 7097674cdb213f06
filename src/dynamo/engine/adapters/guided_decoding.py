"""Guided decoding, translated to vLLM's structured outputs; the other adapters rename the fields.

A JSON schema, regex, choice or grammar alone has a field of its own. Thoughts before an answer, tool calls, and
alternatives of two are composed as a structural tag of XGrammar (`xgrammar.structural_tag`), the default backend of all
three libraries.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.protocols import generate


class GuidedSupport(NamedTuple):
    """The guided decoding of a library, as it was started."""

    backend: str = "auto"  # what compiles grammars, as the library's flags name it
    has_reasoner: bool = (
        False  # the library finds the end of thoughts itself, and guides only the answer
    )
    has_choice: bool = True  # there is a field for a choice of texts


def structured_output_fields(
    guided: generate.GuidedDecoding, support: GuidedSupport
) -> dict[str, Any]:
    """Return one of the fields json, regex, choice, grammar and structural_tag; others may be None.

    Raises InvalidRequest.
    """
    if guided.backend not in (None, "auto", support.backend):
        raise errors.InvalidRequest(
            f"guided_decoding_backend: expected auto or {support.backend}, with which the engine was started,"
            f" got {guided.backend!r}",
            param="guided_decoding_backend",
        )
    thoughts = None if support.has_reasoner else guided.thoughts
    is_composed = guided.choice is not None and not support.has_choice
    if thoughts is not None or guided.calls is not None or is_composed:
        tag = {"type": "structural_tag", "format": _tag_format(guided, thoughts)}
        return {"structural_tag": json.dumps(tag)}
    return {
        "json": guided.json,
        "regex": guided.regex,
        "choice": list(guided.choice) if guided.choice is not None else None,
        "grammar": guided.grammar,
    }


def _tag_format(
    guided: generate.GuidedDecoding, thoughts: generate.GuidedReasoning | None
) -> dict[str, Any]:
    formats = [_calls_format(guided, guided.calls)] if guided.calls is not None else []
    if any((guided.json, guided.regex, guided.choice, guided.grammar)):
        formats.append(_text_format(guided))
    answer = _any_of(formats)
    if thoughts is None:
        return answer
    with_thoughts = [
        {
            "type": "sequence",
            "elements": [_tag(begin, {"type": "any_text"}, list(thoughts.closes)), answer],
        }
        for begin in thoughts.opens or ("",)
    ]
    return _any_of([*with_thoughts, answer] if thoughts.opens else with_thoughts)


def _text_format(guided: generate.GuidedDecoding) -> dict[str, Any]:
    if guided.json is not None:
        return _schema_format(guided, guided.json)
    if guided.regex is not None:
        return {"type": "regex", "pattern": guided.regex}
    if guided.choice is not None:
        return _any_of([{"type": "const_string", "value": text} for text in guided.choice])
    return {"type": "grammar", "grammar": guided.grammar}


def _calls_format(
    guided: generate.GuidedDecoding, calls: generate.GuidedToolCalls
) -> dict[str, Any]:
    """Return the format of tool calls. XGrammar can limit their number only to one, or not at all."""
    tool_tags = [
        _tag(
            f'{{"name": {json.dumps(tool.name)}, "arguments": ',
            _schema_format(guided, tool.parameters),
            "}",
        )
        for tool in calls.tools
    ]
    separated = {
        "type": "tags_with_separator",
        "tags": tool_tags,
        "separator": calls.between,
        "at_least_one": True,
        "stop_after_first": calls.max_calls == 1,
    }
    return _tag(calls.begin, separated, calls.end)


def _tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema_format(guided: generate.GuidedDecoding, text: str) -> dict[str, Any]:
    try:
        return {"type": "json_schema", "json_schema": json.loads(text)}
    except ValueError as error:
        raise errors.InvalidRequest(
            f"{guided.param}: expected a JSON schema: {error}", param=guided.param
        ) from error


def _any_of(formats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}
