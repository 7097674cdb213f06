"""Guided decoding of a request: the one grammar that the engine enforces, and what may precede the guided part.

Four fields of a request are joined here: a response format, vLLM's guided fields, the same fields in `nvext`, and tool
calls that are forced. Forced calls are given to the engine tool by tool rather than as one schema, so that each tool's
parameters stay a schema of their own, so that its `$ref`s keep their meaning.
"""  # decider

import operator
from typing import Any

import msgspec

from dynamo.base import errors
from dynamo.preprocess import inputs
from dynamo.preprocess.parsers import formats, tool_calls
from dynamo.protocols import generate

MAX_CALLS = 32  # of one answer that must call
_GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NO_GUIDES = (None,) * len(_GUIDES)
_get_guides = operator.attrgetter(*_GUIDES)
_ANY_OBJECT = '{"type":"object"}'
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # of a property
# Keywords of a schema with schemas as values: by name, or one or a list of them.
_SCHEMA_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")


def from_fields(request: inputs.GenerationInput) -> generate.GuidedDecoding | None:
    """Return what the guided fields or the response format ask for. Raises InvalidRequest if several are set."""
    guide, answer_format = _from_guides(request), _from_response_format(request)
    if guide is not None and answer_format is not None:
        raise errors.InvalidRequest.of_param(
            guide.param, f"not together with {answer_format.param}"
        )
    return guide or answer_format


def _from_guides(request: inputs.GenerationInput) -> generate.GuidedDecoding | None:
    if (
        request.nvext is None
        and request.structured_outputs is None
        and _get_guides(request) == _NO_GUIDES
    ):  # nearly always so
        return None
    guide = _from_guided_fields(request)
    if request.structured_outputs is None:
        return guide
    structured = _from_structured_outputs(request.structured_outputs, _backend(request))
    if guide is not None and guide != msgspec.structs.replace(structured, param=guide.param):
        raise errors.InvalidRequest.of_param(
            guide.param, "not together with structured_outputs, which differs"
        )
    return structured


def _from_guided_fields(request: inputs.GenerationInput) -> generate.GuidedDecoding | None:
    names = [name for name in _GUIDES if _read_field(request, name) is not None]
    if not names:
        return None
    if len(names) > 1:
        raise errors.InvalidRequest.of_param(
            names[1], f"expected at most one of {', '.join(_GUIDES)}, got {names[0]}, too"
        )
    (name,) = names
    value = _read_field(request, name)
    if not value and name != "guided_json":
        raise errors.InvalidRequest.of_param(name, "expected at least one choice, got none")
    kind = name.removeprefix("guided_")
    if kind == "choice":
        value = tuple(value)
    elif kind == "json" and not isinstance(value, str):
        value = _encode_schema(value)
    return generate.GuidedDecoding(**{kind: value}, backend=_backend(request), param=name)


def _from_structured_outputs(
    outputs: inputs.StructuredOutputs, backend: str | None
) -> generate.GuidedDecoding:
    """Return what vLLM's `structured_outputs` ask for. Raises InvalidRequest unless exactly one form is set."""
    forms = {
        kind: value
        for kind in ("json", "regex", "choice", "grammar")
        if (value := getattr(outputs, kind)) is not None
    }
    if outputs.json_object:
        forms["json_object"] = _ANY_OBJECT
    param = "structured_outputs"
    if len(forms) != 1 or outputs.choice == []:
        got = ", ".join(forms) or "none"
        raise errors.InvalidRequest.of_param(
            param, f"expected one of json, regex, choice, grammar, json_object, got {got}"
        )
    ((kind, value),) = forms.items()
    if kind == "json" and not isinstance(value, str):
        value = _encode_schema(value)
    if kind == "choice":
        value = tuple(value)
    form = {kind.removesuffix("_object"): value}
    return generate.GuidedDecoding(**form, backend=backend, param=param)


def from_conversation(
    request: inputs.Conversation, answer_format: formats.AnswerFormat
) -> generate.GuidedDecoding | None:
    """Return what a conversation asks for, of a model that answers in this format.

    Raises InvalidRequest for fields that exclude each other.
    """
    guided = from_fields(request)
    if request.must_call:  # a response format is for text, and there will be none
        if guided is not None and guided.param != request.format_param:
            raise errors.InvalidRequest.of_param(
                guided.param, "not together with a tool_choice that forces a call"
            )
        calls = _guide_calls(request, answer_format.frame)
        return generate.GuidedDecoding(calls=calls, backend=_backend(request), param="tool_choice")
    if guided is None or not request.allows_calls:
        return guided
    if not answer_format.can_choose_to_call:
        raise errors.InvalidRequest.of_param(
            guided.param,
            "with this model not together with tools that may be called or not; "
            "set tool_choice to 'none', 'required' or a function",
        )
    return msgspec.structs.replace(guided, calls=_guide_calls(request, answer_format.frame))


def _read_field(request: inputs.GenerationInput, name: str) -> Any:
    """Return the field at the root, else the one in `nvext`."""
    value = getattr(request, name)
    return getattr(request.extensions, name) if value is None else value


def _backend(request: inputs.GenerationInput) -> str | None:
    backend: str | None = _read_field(request, "guided_decoding_backend")
    return backend


def _from_response_format(request: inputs.GenerationInput) -> generate.GuidedDecoding | None:
    response_format = request.response_format
    if response_format is None or response_format.type == "text":
        return None
    json_schema = response_format.json_schema
    schema = _ANY_OBJECT
    if json_schema is not None and json_schema.schema is not None:
        schema = _encode_schema(json_schema.schema)
    return generate.GuidedDecoding(
        json=schema, backend=_backend(request), param=request.format_param
    )


def _guide_calls(
    request: inputs.Conversation, frame: tool_calls.CallFrame
) -> generate.GuidedToolCalls:
    functions = [tool["function"] for tool in request.allowed_tools]
    name = request.forced_tool
    callable_functions = [function for function in functions if name in (None, function["name"])]
    if not callable_functions:
        names = ", ".join(repr(function["name"]) for function in functions) or "none"
        raise errors.InvalidRequest.of_param(
            "tool_choice",
            f"expected a tool of this request ({names}), got "
            + ("'required'" if name is None else f"{name!r:.80}"),
        )
    is_single = name is not None or request.parallel_tool_calls is False
    return generate.GuidedToolCalls(
        tools=tuple(
            generate.ToolSchema(name=function["name"], parameters=_encode_parameters(function))
            for function in callable_functions
        ),
        begin=frame.begin,
        between=frame.between,
        end=frame.end,
        max_calls=1 if is_single else MAX_CALLS,
    )


def _encode_parameters(function: dict[str, Any]) -> str:
    """Return the JSON schema of the arguments, which are an object. Raises InvalidRequest."""
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise errors.InvalidRequest.of_param(
            "tools", f"expected parameters of {function['name']!r} with the type 'object'"
        )
    return _encode_schema({"type": "object", **schema})


def _encode_schema(schema: dict[str, Any]) -> str:
    """Return a schema as JSON, without rules for the names of properties that any name keeps to."""
    text = msgspec.json.encode(schema)
    if b'"propertyNames"' in text:
        root = msgspec.json.decode(text)
        _drop_name_rules(root)
        text = msgspec.json.encode(root)
    return text.decode()


def _drop_name_rules(root: Any) -> None:
    """Drop them from a schema and those within it: Zod writes one for each record, and no library has the keyword."""
    schemas = [root]
    while schemas:
        schema = schemas.pop()
        if not isinstance(schema, dict):
            continue
        if schema.get("propertyNames") in _ANY_NAME:
            del schema["propertyNames"]
        for key, value in schema.items():
            if key in _SCHEMA_TABLES and isinstance(value, dict):
                schemas += value.values()
            elif key in _SCHEMAS:
                schemas += value if isinstance(value, list) else [value]
