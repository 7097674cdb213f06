"""The answer format that a model's chat template shows."""

import dataclasses

import pytest
from chat_templates import rendered
from parser_rig import TOOLS, content, read

from dynamo.base import errors
from dynamo.preprocess.parsers import formats, harmony, parser


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tools> … </tools> <tool_call>\n{\"name\": <function-name>, … <think>\n\n</think>", "qwen3", "qwen3"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder", None),
        ("{{- '<|python_tag|>' + message.content }}", "llama3_json", None),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json", None),
        ("'[TOOL_CALLS] [' … '[/THINK]' '[THINK]'", "mistral", "mistral"),
        ("'<｜tool▁calls▁begin｜>' … '\\n' + '```json' … '</think>'", "deepseek_v3", "basic"),
        ("'<｜tool▁calls▁begin｜>' … '<｜tool▁sep｜>' … '</think>'", "deepseek_v3_1", "basic"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|tool_call|> … 'Here is my thought process: '", "granite", "granite"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "gpt_oss"),
        ("<TOOLCALL>", "nemotron_deci", None),
        ("<|python_start|>", "pythonic", None),
        ("<tool_calls>", "jamba", None),
        ("◁think▷", None, "kimi"),
        ("<tool_call>{function-name}\n<arg_key>", "glm45", None),
        ("<seed:tool_call>\n<function=f> … '<seed:think>' + '</seed:think>'", "seed_oss", "seed_oss"),
        ("'<minimax:tool_call>\n' … '<invoke name=\"' … '</think>'", "minimax_m2", "basic"),
        ("'<minimax:tool_call>' … '\n<response>' … '</think>'", "minimax_m2", "basic"),
        ("'<|channel>thought\n' … '<|tool_call>call:' … '<|\"|>'", "gemma4", "gemma4"),
        ("'<｜DSML｜tool_calls>' … '</think>'", "deepseek_v4", "basic"),
        ("<|tool_call_start|>[", "lfm2", None),
        ("'<|START_ACTION|>[' … '<|START_THINKING|>'", "cohere_command", "cohere_command"),
        ("'List of tools: <|tool_list_start|>['", "lfm2", None),
        ('"List of tools: ["', "lfm2", None),
        ("'<|function_call|>'", "gigachat3", None),
        ("'<|open|>' + tag … '<|sep|>' … open_tag('think') … 'argument'", "kimi_k3", "kimi_k3"),
        ("'role': 'function call' … '<|role_sep|>'", "gigachat3", None),
        ("'<think{}>'.format(HYTK) … '<tool_sep{}>'.format(HYTK)", "hy_v3", "hy_v3"),
        ("']<]minimax[>[' … '<tool_call>' … '</mm:think>'", "minimax_m3", "minimax_m3"),
        ("'think_mode=True' … '</think>' … '<response>\n' … '<tool_call>'", "ernie45", "ernie45"),
        ("'<parameter={}>' … preserved exactly as-is … '<function='", "mimo", None),
        ("'<|tool_call:begin|>' … '<|think|>' … '<|content|>'", "solar_open", "solar_open"),
        ("'<tool_calls>[' … '[BEGIN FINAL RESPONSE]'", "jamba", "apriel"),
        ("'<|START_ACTION|>' … '<|START_THINKING|>' … '<|START_TEXT|>'", "cohere_command", "cohere_command4"),
        ("{{ messages }}", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_format_is_guessed_from_the_template(template, tools, reasoning):
    chosen = formats.select_format(None, None, template)
    wanted = formats.REASONING_FORMATS.get(reasoning)

    assert chosen.tools is formats.TOOL_CALL_FORMATS.get(tools)
    assert (chosen.reasoning and chosen.reasoning.marks) == (wanted and wanted.marks)


# In the shapes of the families' own, of which each shows the beginning of an answer and a message that has been one.
MIMO = """\
{%- if tools %}The value enclosed between parameter tags is preserved exactly as-is.{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments|items %}
            {{- '<parameter=' + name + '>' + (value if value is string else value|tojson) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SOLAR = """\
{%- for message in messages %}
    {{- '<|begin|>' + message.role }}
    {%- if message.role == 'assistant' %}
        {{- '<|think|>' + message.reasoning_content + '<|end|><|begin|>assistant' }}
    {%- endif %}
    {{- '<|content|>' + message.content + '<|end|>' }}
    {%- if message.tool_calls %}{{- '<|begin|>assistant<|tool_calls|>' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call:begin|>' + call.id + '<|tool_call:name|>' + call.function.name }}
        {{- '<|tool_call:args|>' + call.function.arguments|tojson + '<|tool_call:end|>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant' }}{%- endif %}"""
APRIEL = """\
{%- for message in messages %}
    {{- '<|begin_' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {{- 'Here are my reasoning steps:\\n' + message.reasoning_content + '\\n[BEGIN FINAL RESPONSE]\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '\\n<tool_calls>[' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson + '}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']</tool_calls>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin_assistant|>\\nHere are my reasoning steps:\\n' }}{%- endif %}"""


@pytest.mark.parametrize("template", [MIMO, SOLAR, APRIEL])
def test_message_that_a_template_writes_is_read_as_it_was(template):
    user = {"role": "user", "content": "What is it like there?"}
    arguments = {"city": "Paris\n", "days": 2}
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "a1b2c3d4e5", "type": "function", "function": function}
    answer = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [call, call],
    }
    prompt = rendered(template, [user], tools=[call])
    text = rendered(template, [user, answer], tools=[call], add_generation_prompt=False)
    chosen = formats.select_format(None, None, template)
    written = text.removeprefix(prompt).removesuffix("<|im_end|>")

    expected = parser.ToolCall("get_weather", '{"city": "Paris\\n", "days": 2}')
    told = [parser.Reasoning("hm"), content("I look."), expected, expected]
    assert read(chosen.parsers(prompt, TOOLS).new(), written) == told
    assert read(chosen.parsers(prompt, TOOLS).new(), *written) == told


@pytest.mark.parametrize(
    ("tools", "reasoning"),
    [
        ("deepseek_v31", "deepseek_v3"), ("deepseek_v32", "holo2"), ("openai", "openai_gptoss"),
        ("llama4_json", None), ("granite-20b-fc", None), ("qwen3_json", "qwen3"), ("step3p5", "step3p5"),
        ("ling3", "ling3"), ("poolside_v1", "poolside_v1"), ("minimax_m2", "minimax_m2_append_think"),
        ("cohere_command3", "cohere_command4"), ("mimo", "mimo"), ("qwen3_coder", "granite_thinking_parser"),
    ],
)  # fmt: skip
def test_names_of_vllm_are_known(tools, reasoning):
    formats.check_names(tools, reasoning)


def test_guessed_format_does_not_force_reasoning():
    assert formats.REASONING_FORMATS["mistral"].is_forced
    assert not formats.select_format(None, None, "[THINK]").reasoning.is_forced
    assert formats.select_format(None, "mistral", "").reasoning.is_forced


def test_minimax_m3_is_spelled_with_a_dash_too():
    assert formats.TOOL_CALL_FORMATS["minimax-m3"] is formats.TOOL_CALL_FORMATS["minimax_m3"]
    assert formats.REASONING_FORMATS["minimax-m3"] is formats.REASONING_FORMATS["minimax_m3"]


def test_model_without_marks_needs_no_parser():
    assert formats.select_format(None, None, "").parsers("hi", {}) is None
    assert formats.select_format("hermes", None, "").parsers("hi", None) is None
    assert formats.select_format(None, None, "").marks == ()


def test_special_token_within_a_mark_of_gigachat_is_visible():
    form = formats.TOOL_CALL_FORMATS["gigachat3"]

    assert any("<|role_sep|>" in mark for mark in form.opens)
    assert "<|role_sep|>" in form.marks


def test_unknown_parser_names_are_refused():
    formats.check_names("none", "none")
    formats.check_names(None, None)

    with pytest.raises(
        errors.ConfigError, match="--dyn-reasoning-parser: expected one of apriel, basic, "
    ):
        formats.select_format(None, "hermes", "")


@pytest.mark.parametrize(
    ("part", "known"),
    [
        ("tools", formats.TOOL_CALL_FORMATS["harmony"]),
        ("reasoning", formats.REASONING_FORMATS["gpt_oss"]),
    ],
)
def test_copy_of_a_harmony_format_is_read_by_the_parser_of_harmony(part, known):
    answer = formats.AnswerFormat(**{part: dataclasses.replace(known)})

    assert answer.marks == harmony.MARKS
