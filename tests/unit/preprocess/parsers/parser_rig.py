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
    "mimo": "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>",
    "phi4": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "nemotron_deci": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "jamba": '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n]</tool_calls>',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}',
    "default": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" '
    'string="true">Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
    "</function>\n</seed:tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "dots": "<dots_function_call>\n<invoke name=get_weather>\n<parameter name=city>Paris</parameter>\n"
    "</invoke>\n</dots_function_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
    '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    "<｜tool_calls_end｜>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris</param></function>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}"
    "<end_function_call>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    "olmo3": '<function_calls>\nget_weather(city="Paris")\n</function_calls>',
    "granite_20b_fc": '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}',
    "longcat": '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}'
    "</longcat_tool_call>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}'
    "<|action_end|>",
    "cohere_command": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "Paris"}}\n]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
    "hy_v3": "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
    "]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "gigachat3": '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "solar_open": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
    '{"city": "Paris"}<|tool_call:end|><|calls|>',
    "xlam": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
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
    "glm45": ONE_CALL["glm45"] + ONE_CALL["glm45"].replace("\n", "").replace("Paris", "Rome"),
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="false">"Rome"</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "minimax_m2": '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
    "\n<invoke name='get_weather'><parameter name='city'>Rome</parameter></invoke></minimax:tool_call>",
    "solar_open": ONE_CALL["solar_open"].removesuffix("<|calls|>")
    + ONE_CALL["solar_open"].removeprefix("<|tool_calls|>").replace("Paris", "Rome"),
    "gemma4": ONE_CALL["gemma4"] + ONE_CALL["gemma4"].replace("Paris", "Rome"),
    "olmo3": '<function_calls>\nget_weather(city="Paris")\nget_weather(city="Rome")\n</function_calls>',
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"get_weather": {"city": "Rome"}}]'
    "<|tools_suffix|>",
    "phi4": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "jamba": '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_calls>',
    "harmony": ONE_CALL["harmony"]
    + "<|call|><|start|>assistant"
    + ONE_CALL["harmony"].replace("Paris", "Rome"),
}  # fmt: skip


def make_parser(tools=None, reasoning=None, *, prompt="", known=TOOLS, whole_tools=None):
    """For an answer of these formats; with `whole_tools` other calls come in parts."""
    chosen = formats.AnswerFormat(
        formats.TOOL_CALL_FORMATS[tools] if tools else None,
        formats.REASONING_FORMATS[reasoning] if reasoning else None,
    )
    parsers = chosen.parsers(prompt, known if tools else None, whole_tools=whole_tools)
    return parsers.new() if parsers else None


def read(made, *pieces):
    """All events of a text that comes in these pieces, neighbours of one kind joined."""
    found = [event for piece in pieces for event in made.push(piece)]
    return joined([*found, *made.finish()])


def joined(found):
    told = []
    for event in found:
        last = told[-1] if told else None
        same = type(last) is type(event)
        if same and isinstance(event, parser.Content | parser.Reasoning | parser.CallArguments):
            told[-1] = type(event)(last.text + event.text)
        else:
            told.append(event)
    return told


def with_whole_calls(found):
    """The same events with each call that came in parts as one."""
    told, begun = [], []
    for event in found:
        match event:
            case parser.CallBegin(name):
                begun = [name]
            case parser.CallArguments(text):
                begun.append(text)
            case parser.CallEnd():
                told.append(parser.ToolCall(begun[0], "".join(begun[1:])))
            case _:
                told.append(event)
    return told


def content(text):
    return parser.Content(text)
