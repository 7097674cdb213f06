"""The tools, samples and feeding functions that tests of parsers share."""

from dynamo.preprocess.parsers import formats, parser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array"},
    },
}
TOOLS = {"get_weather": WEATHER, "get_time": {}}
PARIS = parser.ToolCall("get_weather", '{"city": "Paris"}')
ROME = parser.ToolCall("get_weather", '{"city": "Rome"}')

# A call of each format, as the models' cards and templates show it, with nothing around it.
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "pythonic": '[get_weather(city="Paris")]',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "phi4": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "nemotron_deci": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "jamba": '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n]</tool_calls>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}',
    "default": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
}
TWO_CALLS = {
    "hermes": ONE_CALL["hermes"] + "\n" + ONE_CALL["hermes"].replace("Paris", "Rome"),
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "pythonic": '<|python_start|>[get_weather(city="Paris"), get_weather(city="Rome")]<|python_end|>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
    '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Rome"}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
    'get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "qwen3_coder": ONE_CALL["qwen3_coder"] + "\n" + ONE_CALL["qwen3_coder"].replace("Paris", "Rome"),
    "phi4": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "harmony": ONE_CALL["harmony"]
    + "<|call|><|start|>assistant"
    + ONE_CALL["harmony"].replace("Paris", "Rome"),
}  # fmt: skip


def make_parser(tools=None, reasoning=None, *, prompt="", known=TOOLS):
    """For an answer of these formats."""
    chosen = formats.AnswerFormat(
        formats.TOOL_CALL_FORMATS[tools] if tools else None,
        formats.REASONING_FORMATS[reasoning] if reasoning else None,
    )
    parsers = chosen.parsers(prompt, known if tools else None)
    return parsers.new() if parsers else None


def read(made, *pieces):
    """All events of a text that comes in these pieces, neighbours of one kind joined."""
    found = [event for piece in pieces for event in made.push(piece)]
    return joined([*found, *made.finish()])


def joined(found):
    told = []
    for event in found:
        last = told[-1] if told else None
        if type(last) is type(event) and not isinstance(event, parser.ToolCall):
            told[-1] = type(event)(last.text + event.text)
        else:
            told.append(event)
    return told


def content(text):
    return parser.Content(text)
