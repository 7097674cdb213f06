"""From what a caller asks of an answer's shape to what the engine is told: one grammar, and what may stand before it.

Four ways of asking come together here: a response format, vLLM's guided fields, the same in `nvext`, and calls that
are forced. Forced calls are told tool by tool rather than as one schema, so that each tool's parameters stay a schema
of their own, whose `$ref`s mean what they meant.
"""

from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess.parsers import tools
from dynamo.protocols import generate, openai_chat, openai_fields

MAX_CALLS = 32  # of one answer that must call
_SHAPES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_ANY_OBJECT = '{"type":"object"}'


def of_fields(request: openai_fields.GenerationFields) -> generate.GuidedDecoding | None:
    """What the guided fields ask for. Raises InvalidRequest if there are several."""
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
        **{kind: _read(kind, value)}, backend=_field(request, "guided_decoding_backend"), param=name
    )


def of_chat(request: openai_chat.ChatRequest, frame: tools.Frame) -> generate.GuidedDecoding | None:
    """What a chat asks for; forced calls are framed like this. Raises InvalidRequest for what cannot be together."""
    fields, form = of_fields(request), _of_format(request)
    if fields is not None and form is not None:
        raise errors.InvalidRequest(
            f"{fields.param}: not together with {form.param}", param=fields.param
        )
    if request.must_call:
        if fields is not None:
            raise errors.InvalidRequest(
                f"{fields.param}: not together with a tool_choice that forces a call",
                param=fields.param,
            )
        return _of_calls(request, frame)  # a response format is for text, and there will be none
    asked = fields or form
    if asked is not None and request.allows_calls:
        raise errors.InvalidRequest(
            f"{asked.param}: not together with tools that the model may call or not; "
            "set tool_choice to 'none', 'required' or a function",
            param=asked.param,
        )
    return asked


def _field(request: openai_fields.GenerationFields, name: str) -> Any:
    """At the root, else in `nvext`."""
    value = getattr(request, name)
    return getattr(request.extensions, name) if value is None else value


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
    return generate.GuidedDecoding(json=schema, param=request.format_param)


def _of_calls(request: openai_chat.ChatRequest, frame: tools.Frame) -> generate.GuidedDecoding:
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
    calls = generate.Calls(
        tools=tuple(
            generate.ToolSchema(name=one["name"], parameters=_parameters(one)) for one in meant
        ),
        begin=frame.begin,
        between=frame.between,
        end=frame.end,
        max_calls=1 if is_single else MAX_CALLS,
    )
    return generate.GuidedDecoding(calls=calls, param="tool_choice")


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
