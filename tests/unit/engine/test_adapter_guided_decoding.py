"""Guided decoding as vLLM's structured outputs; `tests/with_vllm` checks that XGrammar understands them."""

import json

import pytest

from dynamo.base import errors
from dynamo.engine.adapters import translation
from dynamo.protocols import generate

THOUGHTS = generate.GuidedReasoning(opens=("<think>",), closes=("</think>",))
CALLS = generate.GuidedToolCalls(
    tools=(generate.ToolSchema(name="now", parameters='{"type":"object"}'),),
    begin="<call>",
    between=";",
    end="</call>",
)


def fields(*, has_reasoner=False, **shape):
    support = translation.GuidedSupport(has_reasoner=has_reasoner)
    return translation.structured_output_fields(generate.GuidedDecoding(**shape), support)


def tag(**shape):
    (text,) = fields(**shape).values()
    whole = json.loads(text)

    assert whole["type"] == "structural_tag"
    return whole["format"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("json", "{}", "{}"),
        ("regex", "a+", "a+"),
        ("choice", ("a", "b"), ["a", "b"]),
        ("grammar", "root ::= a", "root ::= a"),
    ],
)
def test_a_constraint_alone_has_a_field_of_its_own(name, value, told):
    given = {key: one for key, one in fields(**{name: value}).items() if one is not None}

    assert given == {name: told}


def test_a_tool_call_is_an_object_with_name_and_arguments():
    made = tag(calls=CALLS)
    (call,) = made["content"]["tags"]

    assert (made["begin"], made["end"]) == ("<call>", "</call>")
    assert call["begin"] == '{"name": "now", "arguments": '
    assert call["content"] == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert made["content"]["stop_after_first"]


def test_an_answer_may_be_tool_calls_or_text():
    kinds = [one["type"] for one in tag(calls=CALLS, regex="a")["elements"]]

    assert kinds == ["tag", "regex"]


def test_thoughts_are_optional_unless_they_have_begun():
    thought, plain = tag(choice=("a",), thoughts=THOUGHTS)["elements"]

    assert thought["elements"][0]["begin"] == "<think>"
    assert thought["elements"][1] == plain == {"type": "const_string", "value": "a"}


def test_thoughts_that_have_begun_must_end():
    lead, answer = tag(grammar="g", thoughts=generate.GuidedReasoning(closes=("x", "y")))[
        "elements"
    ]

    assert (lead["begin"], lead["end"]) == ("", ["x", "y"])
    assert answer == {"type": "grammar", "grammar": "g"}


def test_a_library_with_a_reasoner_gets_no_thoughts():
    assert fields(regex="a", thoughts=THOUGHTS, has_reasoner=True)["regex"] == "a"


def test_an_invalid_schema_is_refused_with_the_callers_parameter():
    with pytest.raises(errors.InvalidRequest) as refusal:
        fields(json="{", thoughts=THOUGHTS, param="response_format")

    assert refusal.value.param == "response_format"


def test_another_backend_than_vllms_is_refused():
    wanted = generate.GuidedDecoding(regex="a", backend="outlines")

    assert (
        translation.structured_output_fields(wanted, translation.GuidedSupport(backend="outlines"))[
            "regex"
        ]
        == "a"
    )
    with pytest.raises(errors.InvalidRequest) as refusal:
        translation.structured_output_fields(wanted, translation.GuidedSupport(backend="xgrammar"))
    assert refusal.value.param == "guided_decoding_backend"
