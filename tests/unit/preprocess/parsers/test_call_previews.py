"""Calls in parts: the same as whole ones, however the text is cut, and early."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser_rig import ONE_CALL, make_parser, read, with_whole_calls

from dynamo.preprocess.parsers import parser

# An argument of the sample of a format that is not JSON.
ARGUMENT = {
    "qwen3_coder": "<parameter=city>\nParis\n</parameter>\n",
    "seed_oss": "<parameter=city>Paris</parameter>\n",
    "mimo": "<parameter=city>Paris</parameter>\n",
    "glm45": "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
    "hy_v3": "<arg_key:opensource>city</arg_key:opensource>\n"
    "<arg_value:opensource>Paris</arg_value:opensource>\n",
    "minimax_m2": '<parameter name="city">Paris</parameter>\n',
    "minimax_m3": "]<]minimax[>[<city>Paris]<]minimax[>[</city>",
    "dots": "<parameter name=city>Paris</parameter>\n",
    "step3": '<steptml:parameter name="city">Paris</steptml:parameter>',
    "minicpm5": '<param name="city">Paris</param>',
    "kimi_k3": '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>',
    "deepseek_v3_2": '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n',
    "deepseek_v4": '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n',
    "deepseek_v41": '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n',
}
PYTHONIC = ("pythonic", "lfm2", "olmo3")
BARE = {"gemma4": '<|"|>', "functiongemma": "<escape>"}
TEXTS = st.text(st.sampled_from("ab é\"'\\\n\r\t<>{}[](),:=/😀\x01"), max_size=12)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "note", "days", "metric", "tags"]),
    st.one_of(TEXTS, st.integers(), st.booleans(), st.lists(TEXTS, max_size=2)),
    max_size=3,
)


def written(name, arguments, dump=json.dumps):
    """A call with these arguments, as a model writes it in this format."""
    sample = ONE_CALL[name]
    if name in PYTHONIC:
        body = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return sample.replace('city="Paris"', body)
    if name in BARE:
        quote = BARE[name]
        body = ",".join(
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{dump(value)}"
            for key, value in arguments.items()
        )
        return sample.replace(f"city:{quote}Paris{quote}", body)
    if name in ARGUMENT:
        body = "".join(
            ARGUMENT[name]
            .replace("true", "true" if isinstance(value, str) else "false")
            .replace("city", key)
            .replace("Paris", value if isinstance(value, str) else dump(value))
            for key, value in arguments.items()
        )
        return sample.replace(ARGUMENT[name], body)
    return sample.replace('{"city": "Paris"}', dump(arguments))


def dump_loosely(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", " : ")).replace("\\n", "\n")


def test_every_format_has_a_way_to_write_arguments():
    assert all(written(name, {"note": "Rome"}) != ONE_CALL[name] for name in ONE_CALL)


@given(
    st.sampled_from(sorted(ONE_CALL)),
    ARGUMENTS,
    st.sampled_from([json.dumps, dump_loosely]),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_call_in_parts_is_the_whole_call_however_its_text_is_cut(name, arguments, dump, places):
    text = written(name, arguments, dump)
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = read(make_parser(name), text)
    streamed = read(make_parser(name, whole_tools=()), text)

    assert read(make_parser(name, whole_tools=()), *pieces) == streamed
    assert read(make_parser(name, whole_tools=()), *text) == streamed
    if any(isinstance(event, parser.ToolCall) for event in whole):
        assert with_whole_calls(streamed) == whole


@pytest.mark.parametrize("name", ARGUMENT)
def test_text_may_hold_the_mark_that_ends_it(name):
    mark = ARGUMENT[name].partition("Paris")[2].strip().removeprefix("]<]minimax[>[")
    arguments = {"city": f"a{mark} b\n{mark}", "note": f"{mark}c"}
    text = written(name, arguments)
    expected = [parser.ToolCall("get_weather", json.dumps(arguments, ensure_ascii=False))]

    assert read(make_parser(name), text) == expected
    assert with_whole_calls(read(make_parser(name, whole_tools=()), *text)) == expected


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("glm45", "</tool_call>"),
        ("hy_v3", "</tool_call:opensource>"),
        ("step3", "</steptml:invoke>"),
        ("minicpm5", "</function>"),
        ("kimi_k3", "<|close|>call<|sep|>"),
        ("deepseek_v3_2", "</｜DSML｜invoke>"),
    ],
)
def test_text_may_hold_the_end_of_a_call_where_values_are_closed(name, end):
    arguments = {"city": f"a{end}\n{end}b", "note": end}
    text = written(name, arguments) + written(name, {})
    expected = [
        parser.ToolCall("get_weather", json.dumps(arguments, ensure_ascii=False)),
        parser.ToolCall("get_weather", "{}"),
    ]

    assert read(make_parser(name), *text) == expected
    assert with_whole_calls(read(make_parser(name, whole_tools=()), text)) == expected
    assert with_whole_calls(read(make_parser(name, whole_tools=()), *text)) == expected


@pytest.mark.parametrize(
    "names", ['"name": "f", "tool_name": "g"', '"tool_name": "g", "name": "f"']
)
def test_name_of_a_call_in_parts_is_that_of_the_whole_call_if_it_has_two(names):
    text = f'<tool_call>\n{{{names}, "arguments": {{"city": "Rome"}}}}\n</tool_call>'

    assert with_whole_calls(read(make_parser("hermes", whole_tools=()), text)) == [
        parser.ToolCall("f", '{"city": "Rome"}')
    ]


@pytest.mark.parametrize(
    "members",
    [
        '"name": "f", "parameters": {"city": "Rome"}, "arguments": {"city": "Oslo"}',
        '"name": "f", "parameters": {"city": "Rome"}, "arguments": null',
        '"name": "f", "arguments": {"city": "Rome"}, "arguments": {"city": "Oslo"}',
        '"arguments": {"city": "Oslo"}, "name": "f", "parameters": {"city": "Rome"}',
        '"name": "f", "arguments": {"city": "Rome"}, "name": "g"',
        '"tool_name": "f", "tool_name": "g", "arguments": {"city": "Rome"}',
        '"name": "f", "arguments": "{\\"city\\": 1}", "parameters": {"city": "Rome"}',
    ],
)
@pytest.mark.parametrize("options", [{"whole_tools": ()}, {}])
def test_first_arguments_behind_the_name_count_in_parts_and_whole(members, options):
    text = f"<tool_call>[{{{members}}}]</tool_call>"

    assert with_whole_calls(read(make_parser("hermes", **options), text)) == [
        parser.ToolCall("f", '{"city": "Rome"}')
    ]


@pytest.mark.parametrize("options", [{"whole_tools": ()}, {}])
def test_tool_that_is_called_twice_in_one_object_is_called_in_parts_and_whole(options):
    text = '<|tools_prefix|>[{"f": {"city": "Rome"}, "f": {"city": "Oslo"}}]<|tools_suffix|>'

    assert with_whole_calls(read(make_parser("apertus", **options), text)) == [
        parser.ToolCall("f", '{"city": "Rome"}'),
        parser.ToolCall("f", '{"city": "Oslo"}'),
    ]


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("value", ["a\nb", "Paris, note: wet {city: Rome"])
def test_json_strings_of_a_format_with_marks_of_its_own_are_read(name, value):
    text = written(name, {"city": [value]}, dump_loosely)

    for options in ({}, {"whole_tools": ()}):
        (call,) = with_whole_calls(read(make_parser(name, **options), text))
        assert json.loads(call.arguments) == {"city": [value]}


@pytest.mark.parametrize("name", ONE_CALL)
def test_arguments_come_before_the_call_ends(name):
    city = "Par\n\u00e9 " * 50
    text = written(name, {"city": city, "days": 3})
    reader = make_parser(name, whole_tools=())
    early = [event for char in text[: text.index("Par") + 100] for event in reader.push(char)]
    shown = "".join(event.text for event in early if isinstance(event, parser.CallArguments))

    assert early[0] == parser.CallBegin("get_weather")
    assert shown.startswith('{"city": "Par\\n')
    assert len(shown) > 80


@pytest.mark.parametrize("name", ONE_CALL)
def test_call_of_a_tool_that_has_to_come_whole_does(name):
    text = ONE_CALL[name]

    assert read(make_parser(name, whole_tools=("get_weather",)), *text) == read(
        make_parser(name), text
    )


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4", "harmony"])
def test_call_that_is_cut_off_has_begun_and_does_not_end(name):
    text = written(name, {"city": "Paris " * 20})
    events = read(make_parser(name, whole_tools=()), *text[: text.index("Paris") + 50])

    assert [type(event) for event in events] == [parser.CallBegin, parser.CallArguments]


def test_several_calls_in_one_array_come_in_parts():
    text = (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [{"b": "}"}]}}, '
        '{"arguments": {}, "name": "g"}, {"id": "x", "name": "h", "arguments": {"c": 1}}]'
    )
    events = read(make_parser("mistral", whole_tools=()), *text)

    assert with_whole_calls(events) == [
        parser.ToolCall("f", '{"a": [{"b": "}"}]}'),
        parser.ToolCall("g", "{}"),
        parser.ToolCall("h", '{"c": 1}'),
    ]


@pytest.mark.parametrize("text", ['"\\utrue"', '"{"a":1}"', "01"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("phi4", 'functools[{"name": "f", "arguments": {"a": %}}, {"name": "g", "arguments": {}}]'),
        ("apertus", '<|tools_prefix|>[{"f": {"a": %}}, {"g": {}}]<|tools_suffix|>'),
    ],
)
def test_call_with_arguments_that_are_no_json_does_not_end_as_another_one_follows(
    name, calls, text
):
    events = read(make_parser(name, whole_tools=()), *calls.replace("%", text))

    assert events == [parser.CallBegin("f"), parser.CallArguments('{"a": %}'.replace("%", text))]


def test_second_object_of_a_message_is_no_call():
    text = '<|channel|>commentary to=functions.f<|message|>{"a": 1}{"b": {"c": 2}}<|call|>'
    events = read(make_parser("harmony", whole_tools=()), *text)

    assert events == [parser.CallBegin("f"), parser.CallArguments('{"a": 1}')]


@pytest.mark.parametrize(
    "text",
    [
        "[get_time(a='x' 'y', b=r'\\n', c='\\x41\\u00e9\\d', d=\"\"\"q\"r\"s\"\"\", e='', f=('t', -1))]",
        "[get_time(a={'k': [1, ')']}, b=None), get_time(), get_time(c='\\'')]",
    ],
)
def test_python_literals_are_shown_as_they_are_read(text):
    streamed = read(make_parser("pythonic", whole_tools=()), *text)

    assert with_whole_calls(streamed) == read(make_parser("pythonic"), text)


def test_half_a_surrogate_pair_is_never_shown():
    text = "[get_time(a='\\ud800')]"

    assert read(make_parser("pythonic"), text) == [parser.Content(text)]
    read(make_parser("pythonic", whole_tools=()), *text)
