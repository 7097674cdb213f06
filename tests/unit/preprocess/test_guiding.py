"""Every way of asking for a shape becomes one thing that the engine is told."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis import chat as openai_chat
from dynamo.frontend.apis import completions as openai_completions
from dynamo.preprocess import guiding
from dynamo.preprocess.parsers import formats, tool_calls
from dynamo.protocols import generate

ARRAYS = formats.AnswerFormat()  # of a model whose calls nobody knows
HERMES = formats.select_format("hermes", "none", "")
NUMBER = {"type": "integer"}


def tool(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return openai_chat.decode(json.dumps(body).encode())


def guide(**fields):
    return guiding.from_conversation(chat(**fields), ARRAYS)


def refused(**fields):
    with pytest.raises(errors.InvalidRequest) as caught:
        guide(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": NUMBER}, {"json": '{"type":"integer"}'}),
        ({"guided_json": "{}"}, {"json": "{}"}),
        ({"guided_json": {}}, {"json": "{}"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        (
            {"guided_grammar": 'start: "a"', "guided_decoding_backend": "auto"},
            {"grammar": 'start: "a"', "backend": "auto"},
        ),
    ],
)
def test_a_guided_field_at_the_root_or_in_nvext(fields, expected):
    name = next(iter(fields))
    completion = openai_completions.decode(
        json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    )
    told = generate.GuidedDecoding(**expected, param=name)

    assert guide(**fields) == guide(nvext=fields) == guiding.from_fields(completion) == told


def test_completion_has_a_response_format():
    body = {"model": "m", "prompt": "x", "response_format": {"type": "json_object"}}
    completion = openai_completions.decode(json.dumps(body).encode())

    assert guiding.from_fields(completion) == guide(response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"json": NUMBER}, {"json": '{"type":"integer"}'}),
        ({"json": "{}"}, {"json": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json": '{"type":"object"}'}),
    ],
)
def test_structured_outputs_of_vllm_become_the_same_grammar(outputs, expected):
    param = "structured_outputs"

    assert guide(structured_outputs=outputs) == generate.GuidedDecoding(**expected, param=param)


@pytest.mark.parametrize(
    ("outputs", "got"),
    [({}, "none"), ({"choice": []}, "choice"), ({"regex": "a", "json": {}}, "json, regex")],
)
def test_structured_outputs_have_exactly_one_form(outputs, got):
    error = refused(structured_outputs=outputs)

    assert error.param == "structured_outputs"
    assert str(error).endswith(f"got {got}")


@pytest.mark.parametrize("place", ["root", "nvext"])
def test_structured_outputs_that_contradict_a_guided_field_are_refused_by_both_names(place):
    fields = {"guided_regex": "b"}
    error = refused(
        structured_outputs={"regex": "a"}, **(fields if place == "root" else {"nvext": fields})
    )

    assert error.param == "guided_regex"
    assert "structured_outputs" in str(error)


def test_structured_outputs_may_repeat_a_guided_field():
    told = guide(structured_outputs={"json": NUMBER}, guided_json=NUMBER)

    assert told == guide(structured_outputs={"json": NUMBER})


def test_structured_outputs_are_enforced_by_the_library_of_the_request():
    told = guide(structured_outputs={"regex": "a"}, guided_decoding_backend="x")

    assert told.backend == "x"


def test_root_field_overrides_nvext():
    told = guide(guided_regex="a", nvext={"guided_regex": "b", "guided_decoding_backend": "auto"})

    assert (told.regex, told.backend) == ("a", "auto")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            '{"type":"object"}',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"b": 1, "a": 2}, "strict": True},
                }
            },
            '{"b":1,"a":2}',
        ),
    ],
)
def test_response_format_becomes_a_schema(fields, expected):
    told = guide(**fields)

    assert (told and told.json) == expected


def test_guided_backend_is_passed_on_with_each_kind_of_guide():
    shaped = guide(response_format={"type": "json_object"}, guided_decoding_backend="x")
    called = guide(
        tools=[tool("f")], tool_choice="required", nvext={"guided_decoding_backend": "x"}
    )

    assert shaped.backend == called.backend == "x"


def test_required_tool_choice_guides_by_the_schemas_of_all_tools():
    with_schema = tool("f", parameters={"properties": {"a": NUMBER}})
    told = guide(tools=[with_schema, tool("g")], tool_choice="required")
    f, g = told.calls.tools

    assert json.loads(f.parameters) == {"type": "object", "properties": {"a": NUMBER}}
    assert json.loads(g.parameters) == {
        "type": "object", "properties": {}, "additionalProperties": False
    }  # fmt: skip
    assert (told.calls.begin, told.calls.between, told.calls.end) == ("[", ", ", "]")
    assert told.calls.max_calls == guiding.MAX_CALLS


def test_named_function_is_called_exactly_once():
    named = {"type": "function", "function": {"name": "g"}}
    told = guide(tools=[tool("f"), tool("g")], tool_choice=named)
    alone = guide(tools=[tool("f")], tool_choice="required", parallel_tool_calls=False)

    assert [one.name for one in told.calls.tools] == ["g"]
    assert told.calls.max_calls == alone.calls.max_calls == 1


def test_required_tool_call_overrides_the_response_format():
    told = guide(tools=[tool("f")], tool_choice="required", response_format={"type": "json_object"})

    assert told.calls is not None
    assert told.json is None


def test_marked_tool_calls_can_be_combined_with_a_guided_text():
    asked = chat(tools=[tool("f")], response_format={"type": "json_object"})
    told = guiding.from_conversation(asked, HERMES)

    assert told.json == '{"type":"object"}'
    assert told.calls.begin == "<tool_call>\n"
    assert told.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "at most one"),
        ({"guided_regex": "a", "nvext": {"guided_json": {}}}, "guided_regex", "at most one"),
        ({"guided_choice": []}, "guided_choice", "at least one choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "not together"),
        ({"tools": [tool("f")], "guided_regex": "a"}, "guided_regex", "set tool_choice"),
        ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, "response_format", "set tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "forces a call"),
        ({"tool_choice": "required"}, "tool_choice", "(none), got 'required'"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "('f'), got 'g'",
        ),
        ({"tools": [tool("f", parameters={"type": "array"})], "tool_choice": "required"}, "tools", "'object'"),
    ],
)  # fmt: skip
def test_conflicting_guided_fields_are_refused(fields, param, words):
    error = refused(**fields)

    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    ("parser", "prompt", "expected"),
    [
        (None, "Hi", None),
        ("basic", "Hi", generate.GuidedReasoning(opens=("<think>",), closes=("</think>",))),
        ("basic", "Hi <think>\n", generate.GuidedReasoning(closes=("</think>",))),
        ("basic", "Hi <think>\n\n</think>\n\n", None),
        ("deepseek_r1", "Hi", generate.GuidedReasoning(closes=("</think>",))),
    ],
)
def test_prompt_decides_how_reasoning_precedes_a_guided_answer(parser, prompt, expected):
    form = formats.select_format("none", parser or "none", "")

    assert form.thoughts(prompt, may_think=True) == expected


def test_a_model_that_shall_not_think_does_not_unless_the_prompt_has_begun_to():
    form = formats.select_format("none", "basic", "")

    assert form.thoughts("Hi", may_think=False) is None
    assert form.thoughts("Hi <think>", may_think=False).closes == ("</think>",)


def test_an_answer_in_channels_cannot_be_guided():
    with pytest.raises(errors.InvalidRequest, match="channels"):
        formats.select_format("harmony", None, "").thoughts("Hi", may_think=True)


@pytest.mark.parametrize("name", ["hermes", "pythonic", "none"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_parser_reads_calls_in_the_forced_format(name, step):
    form = formats.select_format(name, "none", "").forced
    calls = [f'{{"name": "f", "arguments": {{"a": {number}}}}}' for number in range(3)]
    text = form.frame.begin + form.frame.between.join(calls) + form.frame.end
    parser = tool_calls.ToolCallParser(form, {"f": {}})
    found = [
        event for at in range(0, len(text), step) for event in parser.push(text[at : at + step])
    ]
    found += parser.finish()

    assert [(one.name, one.arguments) for one in found] == [
        ("f", f'{{"a": {n}}}') for n in range(3)
    ]


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}])
def test_rule_for_names_that_any_name_keeps_to_is_dropped(names):
    record = {"type": "object", "additionalProperties": NUMBER}
    ruled = {"propertyNames": names, **record}

    def schema(inner):
        rows = {"type": "array", "items": {"anyOf": [inner, NUMBER]}}
        return {"properties": {"rows": rows, "propertyNames": {"type": "string"}}, **inner}

    plain, written = schema(record), schema(ruled)

    assert guide(guided_json=written).json == guide(guided_json=plain).json
    named = {"name": "a", "schema": written}
    told = guide(response_format={"type": "json_schema", "json_schema": named})
    assert told.json == guide(guided_json=plain).json
    told = guide(tools=[tool("f", parameters=written)], tool_choice="required")
    assert json.loads(told.calls.tools[0].parameters) == plain
    assert "propertyNames" in guide(guided_json={"propertyNames": {"maxLength": 3}}).json
