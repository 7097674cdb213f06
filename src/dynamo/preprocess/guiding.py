"""From what a caller asks of an answer's shape to what the engine is told: one grammar, and what may stand before it.

Four ways of asking come together here: a response format, vLLM's guided fields, the same in `nvext`, and calls that
are forced. Forced calls are told tool by tool rather than as one schema, so that each tool's parameters stay a schema
of their own, whose `$ref`s mean what they meant.
"""

import operator
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess.parsers import formats, tool_calls
from dynamo.protocols import generate, openai_chat, openai_fields

MAX_CALLS = 32  # of one answer that must call
_SHAPES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NO_SHAPES = (None,) * len(_SHAPES)
_shapes = operator.attrgetter(*_SHAPES)
_ANY_OBJECT = '{"type":"object"}'


def of_fields(request: openai_fields.GenerationFields) -> generate.GuidedDecoding | None:
    """What the guided fields ask for. Raises InvalidRequest if there are several."""
    if request.nvext is None and _shapes(request) == _NO_SHAPES:  # nearly always so
        return None
    given = [name for name in _SHAPES if _field(request, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise errors.InvalidRequest(
            f"{given[1]}: expected at most one of {', '.join(_SHAPES)}, got {given[0]}, too",
            param=given[1],
        )
    (name,) = given
    value = _field(request, name)
    if not value and name != "guided_json":
        raise errors.InvalidRequest(f"{name}: expected at least one choice, got none", param=name)
    kind = name.removeprefix("guided_")
    return generate.GuidedDecoding(
        **{kind: _read(kind, value)}, backend=_backend(request), param=name
    )


def of_chat(
    request: openai_chat.ChatRequest, form: formats.AnswerFormat
) -> generate.GuidedDecoding | None:
    """What a chat asks for, of a model that answers in this form. Raises InvalidRequest for what cannot be together."""
    fields, shape, must_call = of_fields(request), _of_format(request), request.must_call
    if fields is None and shape is None and not must_call:
        return None
    if fields is not None and shape is not None:
        raise errors.InvalidRequest(
            f"{fields.param}: not together with {shape.param}", param=fields.param
        )
    if must_call and fields is not None:
        raise errors.InvalidRequest(
            f"{fields.param}: not together with a tool_choice that forces a call",
            param=fields.param,
        )
    asked = fields or shape
    if must_call:  # a response format is for text, and there will be none
        calls = _calls(request, form.frame)
        return generate.GuidedDecoding(calls=calls, backend=_backend(request), param="tool_choice")
    if asked is None or not request.allows_calls:
        return asked
    if not form.can_choose_to_call:
        raise errors.InvalidRequest(
            f"{asked.param}: with this model not together with tools that may be called or not; "
            "set tool_choice to 'none', 'required' or a function",
            param=asked.param,
        )
    return msgspec.structs.replace(asked, calls=_calls(request, form.frame))


def _field(request: openai_fields.GenerationFields, name: str) -> Any:
    """At the root, else in `nvext`."""
    value = getattr(request, name)
    return getattr(request.extensions, name) if value is None else value


def _backend(request: openai_fields.GenerationFields) -> str | None:
    found: str | None = _field(request, "guided_decoding_backend")
    return found


def _read(kind: str, value: Any) -> Any:
    match kind:
        case "json":
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
        case "choice":
            return tuple(value)
        case _:
            return value


def _of_format(request: openai_chat.ChatRequest) -> generate.GuidedDecoding | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    described = form.json_schema
    schema = _ANY_OBJECT
    if described is not None and described.schema is not None:
        schema = msgspec.json.encode(described.schema).decode()
    return generate.GuidedDecoding(
        json=schema, backend=_backend(request), param=request.format_param
    )


def _calls(
    request: openai_chat.ChatRequest, frame: tool_calls.CallFrame
) -> generate.GuidedToolCalls:
    functions = [tool["function"] for tool in request.tools or ()]
    name = request.forced_tool
    meant = [one for one in functions if name in (None, one["name"])]
    if not meant:
        known = ", ".join(repr(one["name"]) for one in functions) or "none"
        raise errors.InvalidRequest(
            f"tool_choice: expected a tool of this request ({known}), got "
            + ("'required'" if name is None else f"{name!r:.80}"),
            param="tool_choice",
        )
    is_single = name is not None or request.parallel_tool_calls is False
    return generate.GuidedToolCalls(
        tools=tuple(
            generate.ToolSchema(name=one["name"], parameters=_parameters(one)) for one in meant
        ),
        begin=frame.begin,
        between=frame.between,
        end=frame.end,
        max_calls=1 if is_single else MAX_CALLS,
    )


def _parameters(function: dict[str, Any]) -> str:
    """The schema of its arguments: an object. Raises InvalidRequest."""
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise errors.InvalidRequest(
            f"tools: expected parameters of {function['name']!r} with the type 'object'",
            param="tools",
        )
    return msgspec.json.encode({"type": "object", **schema}).decode()
