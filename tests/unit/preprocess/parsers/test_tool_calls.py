"""Tool calls in each format, as models write them, and text that only resembles one."""

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser_rig import (
    ONE_CALL,
    PARIS,
    ROME,
    TWO_CALLS,
    content,
    make_parser,
    read,
    with_whole_calls,
)

from dynamo.preprocess.parsers import call_scanners, call_syntax, formats, parser


@pytest.mark.parametrize("name", ONE_CALL)
def test_call_is_parsed(name):
    assert read(make_parser(name), ONE_CALL[name]) == [PARIS]


@pytest.mark.parametrize("name", TWO_CALLS)
def test_two_calls_are_parsed(name):
    assert read(make_parser(name), TWO_CALLS[name]) == [PARIS, ROME]


def test_section_of_kimis_calls_may_be_called_that_of_one_call():
    text = ONE_CALL["kimi_k2"].replace("<|tool_calls_section", "<|tool_call_section")

    assert read(make_parser("kimi_k2"), text) == [PARIS]


def test_every_format_has_a_sample():
    sampled = [formats.TOOL_CALL_FORMATS[name] for name in ONE_CALL]

    assert all(form in sampled for form in formats.TOOL_CALL_FORMATS.values())


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3_1", "qwen3_coder", "phi4"])
def test_text_before_a_call_is_content(name):
    assert read(make_parser(name), "I look.\n\n" + ONE_CALL[name]) == [content("I look."), PARIS]


def test_text_around_calls_is_content():
    text = f" Well,\n {ONE_CALL['hermes']}\n\n and {ONE_CALL['hermes']} done.\n"

    assert read(make_parser("hermes"), text) == [
        content(" Well,"), PARIS, content("and"), PARIS, content("done.\n")
    ]  # fmt: skip


@pytest.mark.parametrize("name", formats.TOOL_CALL_FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "Hello.",
        "  two\n\n words \n",
        "<tool_call> is a mark of hermes",
        '<tool_call>{"name": "get_weather"',
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>{1: 2}</tool_call>",
        "<tool_call>\n<function=get_weather",
        "[1, 2, 3]",
        "[link](http://x.y)",
        '{"answer": [1, 2]} and more',
        '{"name": "unknown_tool", "arguments": {}}',
        "[TOOL_CALLS] are marks",
        "functools [is] a module",
        "<|python_tag|>print(1)",
        "<TOOLCALL>[]</TOOLCALL>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>what",
        "",
    ],
)
def test_text_that_is_no_call_is_unchanged_content(name, text):
    assert "".join(event.text for event in read(make_parser(name), text)) == text


def test_marks_within_strings_belong_to_the_call():
    text = '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> \\" }"}}</tool_call>!'

    assert read(make_parser("hermes"), text) == [
        parser.ToolCall("say", '{"text": "</tool_call> \\" }"}'), content("!"),
    ]  # fmt: skip


def test_call_without_arguments_has_empty_arguments():
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>'

    assert read(make_parser("hermes"), text) == [parser.ToolCall("now", "{}")] * 2


@pytest.mark.parametrize("whole_tools", [None, ()])
@pytest.mark.parametrize("key", ["args", "input", "function_arguments"])
def test_call_with_arguments_of_another_name_is_content(key, whole_tools):
    text = f'<tool_call>{{"name": "get_time", "id": 1, "{key}": {{"city": "Paris"}}}}</tool_call>'

    assert read(make_parser("hermes", whole_tools=whole_tools), text) == [content(text)]


def test_arguments_inside_a_string_are_unwrapped():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'

    assert read(make_parser("hermes"), text) == [parser.ToolCall("f", '{"a": 1}')]


def test_line_break_in_a_string_is_escaped():
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>'

    assert read(make_parser("hermes"), text) == [parser.ToolCall("f", '{"a": "x\\ny"}')]


@pytest.mark.parametrize("arguments", ["[1]", "5", '"no object"', "true"])
def test_call_needs_an_object_as_arguments(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    assert read(make_parser("hermes"), text) == [content(text)]


def test_numbers_in_arguments_stay_as_written():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1.10, "b": 12345678901234567890123}}</tool_call>'

    assert (
        read(make_parser("hermes"), text)[0].arguments
        == '{"a": 1.10, "b": 12345678901234567890123}'
    )


def test_only_known_tools_are_called_without_a_mark():
    text = '{"name": "unheard", "parameters": {}}'

    assert read(make_parser("llama3_json"), text) == [content(text)]
    assert read(make_parser("llama3_json"), "<|python_tag|>" + text) == [
        parser.ToolCall("unheard", "{}")
    ]


def test_call_without_a_mark_after_text_is_content():
    text = "Like this: " + ONE_CALL["pythonic"]

    assert read(make_parser("pythonic"), text) == [content(text)]


def test_pythonic_arguments_are_literals():
    text = "[get_weather(city='a\"b', days=-2, metric=True, tags=['x', {'y': None}]), get_time()]"

    assert read(make_parser("pythonic"), text) == [
        parser.ToolCall(
            "get_weather",
            '{"city": "a\\"b", "days": -2, "metric": true, "tags": ["x", {"y": null}]}',
        ),
        parser.ToolCall("get_time", "{}"),
    ]


@pytest.mark.parametrize(
    "text",
    ["[get_time(1)]", "[get_time(**{})]", "[get_time(a=open('x'))]", "[get_time(a=1e999)]",
     "[get_time(a={1})]", "[get_time(]", "[get_time(a=b)]", "[a for a in get_time()]", "[(1)]",
     "<|python_start|>[f()(a=1)]", "[get_time(a='\ud800')"],
)  # fmt: skip
def test_pythonic_code_other_than_plain_calls_is_content(text):
    assert read(make_parser("pythonic"), text) == [content(text)]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("metric=true, tags=[null, {'a': false}]", '{"metric": true, "tags": [null, {"a": false}]}'),
        ("from='en', class = 'b', if=1", '{"from": "en", "class": "b", "if": 1}'),
        ("month=07, days=[010, 0.50, 100, 1e05, 0]", '{"month": 7, "days": [10, 0.5, 100, 100000.0, 0]}'),
        ("note='from=1, true, 007', in=null", '{"note": "from=1, true, 007", "in": null}'),
        ("true=1, null=2, from='a\nb'", '{"true": 1, "null": 2, "from": "a\\nb"}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3"])
def test_call_that_only_resembles_python_is_read(name, written, arguments):
    text = ONE_CALL[name].replace('city="Paris"', written)
    expected = [parser.ToolCall("get_weather", arguments)]

    assert read(make_parser(name), text) == expected
    assert with_whole_calls(read(make_parser(name, whole_tools=()), *text)) == expected


def test_bare_keys_may_have_any_characters_but_those_of_json():
    text = '<|tool_call>call:f{$top:5,@id:[{file path:<|"|>a,b:{<|"|>},{ö : 1}]}<tool_call|>'
    expected = [parser.ToolCall("f", '{"$top": 5,"@id": [{"file path": "a,b:{"},{"ö": 1}]}')]

    assert read(make_parser("gemma4"), text) == expected
    assert with_whole_calls(read(make_parser("gemma4", whole_tools=()), *text)) == expected


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gemma4", "<tool_call|>"),
        ("functiongemma", "<end_function_call>"),
        ("olmo3", "\n</function_calls>"),
    ],
)
def test_complete_call_needs_no_mark_behind_it(name, end):
    text = ONE_CALL[name].removesuffix(end)

    assert read(make_parser(name), text) == [PARIS]
    assert with_whole_calls(read(make_parser(name, whole_tools=()), *text)) == [PARIS]
    assert read(make_parser(name), text[:-1]) == [content(text[:-1])]


def test_tagged_values_are_converted_by_the_schema():
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n[1, \"a\"]\n</parameter>\n"
        "<parameter=note>\nline 1\nline 2\n</parameter>\n</function>\n</tool_call>"
    )  # fmt: skip

    assert read(make_parser("qwen3_coder"), text) == [
        parser.ToolCall(
            "get_weather",
            '{"city": "42", "days": 3, "metric": true, "tags": [1, "a"], "note": "line 1\\nline 2"}',
        )
    ]


def test_one_object_may_stand_between_function_tags():
    text = '<function=get_weather>{"city": "Paris"}</function>'

    assert read(make_parser("qwen3_coder"), text) == [PARIS]


def test_values_written_as_python_does_fit_their_schema():
    text = (
        "<seed:tool_call><function=get_weather><parameter=metric>True</parameter>"
        "<parameter=tags>['a', {'b': None}]</parameter></function></seed:tool_call>"
    )

    assert read(make_parser("seed_oss"), text) == [
        parser.ToolCall("get_weather", '{"metric": true, "tags": ["a", {"b": null}]}')
    ]


NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [{"type": "integer"}, NULL]}, "3"),
        ({"oneOf": [{"$ref": "#/$defs/Age"}, NULL]}, "3"),
        ({"$ref": "#/$defs/Age"}, "3"),
        ({"type": ["integer", "null"]}, "3"),
        ({"anyOf": [{"type": "string"}, NULL]}, '"3"'),
        ({"type": ["string", "null"]}, '"3"'),
        ({"allOf": [{"$ref": "#/$defs/Age"}]}, "3"),
        ({"allOf": [{"$ref": "#/$defs/Age"}, {"description": "in years"}]}, "3"),
        ({"anyOf": [{"allOf": [{"$ref": "#/$defs/Age"}]}, NULL]}, "3"),
        ({"anyOf": [{"oneOf": [{"type": "integer"}]}, NULL]}, "3"),
        ({"enum": [3, 4, None]}, "3"),
        ({"const": 3}, "3"),
        ({"allOf": [{"description": "a text"}]}, '"3"'),
        ({"anyOf": [{"description": "a text"}, NULL]}, '"3"'),
        ({"type": {"of": "no kind"}}, '"3"'),
        ({"enum": "none"}, '"3"'),
        ({"enum": ["3"]}, '"3"'),
        ({}, '"3"'),
    ],
)
def test_optional_value_has_the_type_of_its_schema(schema, expected):
    known = {"f": {"type": "object", "properties": {"age": schema}}}
    text = "<function=f><parameter=age>3</parameter></function>"
    whole = read(make_parser("qwen3_coder", known=known), text)
    streamed = read(make_parser("qwen3_coder", known=known, whole_tools=()), *text)

    assert whole == [parser.ToolCall("f", f'{{"age": {expected}}}')]
    assert with_whole_calls(streamed) == whole


def test_schemas_within_each_other_may_be_many():
    schema = {"type": "integer"}
    for _ in range(400):
        schema = {"anyOf": [schema]}
    known = {"f": {"properties": {"age": schema}}}
    text = "<function=f><parameter=age>3</parameter></function>"

    assert read(make_parser("qwen3_coder", known=known), text) == [
        parser.ToolCall("f", '{"age": "3"}')
    ]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "minicpm5"])
@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"anyOf": [{"type": "string"}, NULL]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "nullable", '"nullable"'),
        ({"type": ["string", "null"]}, "nu", '"nu"'),
        ({"type": ["string", "null"]}, "", '""'),
        ({"type": "string"}, "null", '"null"'),
        ({}, "null", '"null"'),
    ],
)
def test_null_is_null_where_the_schema_allows_it(name, schema, value, expected):
    known = {"get_weather": {"type": "object", "properties": {"city": schema}}}
    text = ONE_CALL[name].replace("Paris", value)
    whole = read(make_parser(name, known=known), text)

    assert whole == [parser.ToolCall("get_weather", f'{{"city": {expected}}}')]
    for pieces in ([text], text):
        streamed = read(make_parser(name, known=known, whole_tools=()), *pieces)
        assert with_whole_calls(streamed) == whole


def test_text_that_xml_leaves_unparsed_loses_its_marks():
    text = (
        '<function name="get_weather"><param name="city"><![CDATA[<b>\nA & B]]></param>'
        '<param name="days">3</param></function>'
    )
    expected = [parser.ToolCall("get_weather", '{"city": "<b>\\nA & B", "days": 3}')]

    assert read(make_parser("minicpm5"), text) == expected
    assert with_whole_calls(read(make_parser("minicpm5", whole_tools=()), *text)) == expected


def test_python_string_may_have_line_breaks():
    text = "<|tool_call_start|>[get_weather(city='New \"York\"\nor so', days=3)]<|tool_call_end|>"
    expected = [parser.ToolCall("get_weather", '{"city": "New \\"York\\"\\nor so", "days": 3}')]

    assert read(make_parser("lfm2"), text) == expected
    assert with_whole_calls(read(make_parser("lfm2", whole_tools=()), *text)) == expected


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\u2028", "\x85", "\f"])
def test_line_ends_in_strings_of_calls_in_lines_are_kept(line_end):
    text = f'<function_calls>\nget_weather(city="New{line_end}York")\nget_time()\n</function_calls>'
    city = call_syntax.dump(f"New{line_end}York")
    expected = [
        parser.ToolCall("get_weather", f'{{"city": {city}}}'),
        parser.ToolCall("get_time", "{}"),
    ]

    assert read(make_parser("olmo3"), text) == expected
    assert with_whole_calls(read(make_parser("olmo3", whole_tools=()), *text)) == expected


def test_python_argument_that_comes_twice_does_so_in_a_stream_and_whole():
    text = "[get_weather(city='a', days=1, city='b')]"
    expected = [parser.ToolCall("get_weather", '{"city": "a", "days": 1, "city": "b"}')]

    assert read(make_parser("pythonic"), text) == expected
    assert with_whole_calls(read(make_parser("pythonic", whole_tools=()), *text)) == expected


def test_value_of_many_quotes_takes_no_time():
    began_s = time.process_time()

    assert call_syntax.read_literal("[" + "\\'" * 20_000) is None
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize("value", ["soon", "1e999"])
def test_tagged_value_that_does_not_fit_its_schema_is_a_text(value):
    text = f"<function=get_weather><parameter=days>{value}</parameter></function>"
    call = parser.ToolCall("get_weather", f'{{"days": "{value}"}}')

    assert read(make_parser("qwen3_coder"), text) == [call]


@pytest.mark.parametrize(
    "text", ["<function=></function>", "<function=a<b></function>", "<function=f>{</function>"]
)
def test_malformed_tag_is_content(text):
    assert read(make_parser("qwen3_coder"), text) == [content(text)]


def test_tagged_values_keep_their_type():
    text = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" string="true">3'
        '</｜DSML｜parameter><｜DSML｜parameter name="tags" string="false">[1, {"a": null}]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="city" string="true">\n<b>"x"</b>\n</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>"
    )

    assert read(make_parser("deepseek_v4"), text) == [
        parser.ToolCall(
            "get_weather",
            '{"days": "3", "tags": [1, {"a": null}], "city": "\\n<b>\\"x\\"</b>\\n"}',
        )
    ]


def test_values_have_the_type_that_kimi_k3_names():
    value = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    text = (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        + value.format("city", "string", '3 "x"')
        + value.format("tags", "array", "[1, null]")
        + value.format("days", "number", "2.50")
        + value.format("metric", "null", "null")
        + "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )

    told = [
        parser.ToolCall(
            "get_weather",
            '{"city": "3 \\"x\\"", "tags": [1, null], "days": 2.5, "metric": null}',
        )
    ]
    assert read(make_parser("kimi_k3"), text) == told
    assert with_whole_calls(read(make_parser("kimi_k3", whole_tools=()), *text)) == told


NESTED = {
    "type": "object",
    "properties": {
        "where": {"anyOf": [{"type": "object", "properties": {"zip": {"type": "integer"}}}, {}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "days": {"type": "array", "items": {"type": "integer"}},
        "stops": {"type": "array"},
        "note": {"type": "string"},
        "wet": {"type": "boolean"},
    },
}


def in_tags(*arguments):
    """A call as MiniMax M3 writes it; its tags are written here without the token before each."""
    body = "".join(arguments).replace("<", "]<]minimax[>[<")
    return ONE_CALL["minimax_m3"].replace("]<]minimax[>[<city>Paris]<]minimax[>[</city>", body)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("<where><zip>75001</zip><zone>7</zone></where>", {"where": {"zip": 75001, "zone": "7"}}),
        ("<where><a><item>x</item></a><b>y</b><b>z</b></where>", {"where": {"a": ["x"], "b": ["y", "z"]}}),
        ("<tags>\n<item> 1\n</item>\n<item>2</item>\n</tags>\n", {"tags": [" 1\n", "2"]}),
        ("<days><item>1</item></days><note> 2</note>", {"days": [1], "note": " 2"}),
        ("<stops><item><at>Rome</at></item><item>x</item></stops>", {"stops": [{"at": "Rome"}, "x"]}),
        ("<stops></stops><note></note><wet>true</wet>", {"stops": [], "note": "", "wet": True}),
        ('<days>[1, 2]</days><other>{"a": 1}</other>', {"days": [1, 2], "other": '{"a": 1}'}),
        ("", {}),
    ],
)  # fmt: skip
def test_nested_tags_are_lists_and_objects(arguments, expected):
    text = in_tags(arguments)
    known = {"get_weather": NESTED}
    (call,) = read(make_parser("minimax_m3", known=known), text)
    streamed = read(make_parser("minimax_m3", known=known, whole_tools=()), *text)

    assert json.loads(call.arguments) == expected
    assert with_whole_calls(streamed) == [call]


@pytest.mark.parametrize(
    "arguments", ["<a>1</b>", "<a>1", "</a>", "x<a>1</a>", "<a>x<b>1</b></a>", "<a>1</a>x"]
)
def test_nested_tags_that_do_not_fit_are_content(arguments):
    text = in_tags(arguments)

    assert read(make_parser("minimax_m3"), text) == [content(text)]


def test_bare_keys_and_marked_strings_become_json():
    text = (
        '<|tool_call>call:get_weather{city:<|"|>a:{"b"},c:1\\<|"|>,days:-2,metric:true,'
        'tags:[<|"|>x<|"|>,{deep_key:null}]}<tool_call|>'
    )

    assert read(make_parser("gemma4"), text) == [
        parser.ToolCall(
            "get_weather",
            '{"city": "a:{\\"b\\"},c:1\\\\","days": -2,"metric": true,"tags": ["x",{"deep_key": null}]}',
        )
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>f\nno tags</tool_call>"),
        ("deepseek_v4", '<｜DSML｜invoke name="f"><b></｜DSML｜invoke>'),
        ("minimax_m2", "<invoke name=></invoke>"),
        ("gemma4", "<|tool_call>call:f<tool_call|>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
        ("apertus", "<|tools_prefix|>[{}]"),
        ("apertus", '<|tools_prefix|>[{"f": 1}]'),
        ("olmo3", "<function_calls></function_calls>"),
        ("olmo3", "<function_calls>f(x)</function_calls>"),
        ("cohere_command", '<|START_ACTION|>[{"parameters": {}}]'),
    ],
)
def test_malformed_call_of_a_family_is_content(name, text):
    assert read(make_parser(name), text) == [content(text)]


def test_too_long_call_is_content(monkeypatch):
    monkeypatch.setattr(call_scanners, "MAX_CALL_CHARS", 12)

    for name in ("hermes", "qwen3_coder", "harmony"):
        told = read(make_parser(name), *ONE_CALL[name])
        assert "".join(event.text for event in told) == ONE_CALL[name]
        ended = ONE_CALL[name] + "<|call|>"
        assert read(make_parser(name), ended) == read(make_parser(name), *ended)


@pytest.mark.parametrize(
    ("name", "begin", "argument", "end"),
    [
        ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
        ("minicpm5", '<function name="f">', '<param name="a">', "</function>"),
    ],
)
def test_argument_that_begins_again_and_again_takes_no_time(name, begin, argument, end):
    """All of a frontend's streams wait meanwhile."""
    text, began_s = begin + argument * 4000 + end, time.process_time()
    events = read(make_parser(name), text)

    assert events == [content(text)]
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize("whole_tools", [None, ()])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m3"])
def test_value_that_could_just_be_read_ends_no_answer(name, whole_tools):
    """Python reads lists of a depth that it cannot write from there."""
    known = {"get_weather": {"properties": {"city": {"type": "array"}}}}

    for depth in range(900, 1000):
        text = ONE_CALL[name].replace("Paris", "[" * depth + "]" * depth)
        assert read(make_parser(name, known=known, whole_tools=whole_tools), text)


def test_too_deeply_nested_brackets_are_content():
    text = "<tool_call>" + "[" * 300 + "]" * 300

    assert read(make_parser("hermes"), text) == [content(text)]


def test_no_mark_of_a_format_is_the_beginning_of_another():
    for form in formats.TOOL_CALL_FORMATS.values():
        marks = form.opens + form.sections + form.closes
        assert not any(a != b and b.startswith(a) for a in marks for b in marks)


PIECES = st.sampled_from(
    [
        *ONE_CALL.values(), *TWO_CALLS.values(), "<tool_call>", "</tool_call>", "<function=", "</function>",
        '{"name": "get_weather", "arguments": ', "{", "}", "[", "]", '"', "\\", "(", "'", " ", "\n", " " * 300,
        "a", "é", "functools", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|end|>", "analysis", "<|start|>",
        "<|python_tag|>", ";", "<TOOLCALL>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "x" * 300,
        "<think>", "</think>", "<|tool_calls_section_begin|>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>", "<arg_key>", "</arg_key>", "<|tool_call>", "<tool_call|>", '<|"|>', "call:",
        "<invoke name=", "</invoke>", "<function_calls>", "</function_calls>",
    ]
)  # fmt: skip


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.sampled_from(sorted(formats.TOOL_CALL_FORMATS)),
    st.sampled_from([None, "basic", "deepseek_r1", "gpt_oss"]),
    st.lists(PIECES, max_size=6),
    st.lists(st.integers(0, 5000), max_size=8),
)
def test_cuts_do_not_change_events(name, reasoning, parts, places):
    text = "".join(parts)
    whole = read(make_parser(name, reasoning), text)

    assert read(make_parser(name, reasoning), *text) == whole
    assert read(make_parser(name, reasoning), *cut(text, places)) == whole


@given(
    st.sampled_from(sorted(formats.TOOL_CALL_FORMATS)),
    st.lists(PIECES, max_size=6),
    st.lists(st.integers(0, 5000), max_size=8),
)
def test_cuts_do_not_change_streamed_calls(name, parts, places):
    text = "".join(parts)
    whole = read(make_parser(name, whole_tools=()), text)
    calls = [event for event in read(make_parser(name), text) if type(event) is parser.ToolCall]
    streamed = [event for event in with_whole_calls(whole) if type(event) is parser.ToolCall]

    assert read(make_parser(name, whole_tools=()), *text) == whole
    assert read(make_parser(name, whole_tools=()), *cut(text, places)) == whole
    assert all(call in streamed for call in calls)


@given(
    st.sampled_from(sorted(formats.TOOL_CALL_FORMATS.keys() - {"harmony"})),
    st.lists(PIECES, max_size=6),
)
def test_text_without_calls_is_unchanged(name, parts):
    text = "".join(parts)
    told = read(make_parser(name), text)

    if not any(isinstance(event, parser.ToolCall) for event in told):
        assert "".join(event.text for event in told) == text
