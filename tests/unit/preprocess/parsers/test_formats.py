"""The answer format that a model's chat template shows."""

import dataclasses

import pytest

from dynamo.base import errors
from dynamo.preprocess.parsers import formats, harmony


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
        ("{{ messages }}", None, None),
        ("", None, None),
    ],
)  # fmt: skip
def test_format_is_guessed_from_the_template(template, tools, reasoning):
    chosen = formats.select_format(None, None, template)
    wanted = formats.REASONING_FORMATS.get(reasoning)

    assert chosen.tools is formats.TOOL_CALL_FORMATS.get(tools)
    assert (chosen.reasoning and chosen.reasoning.marks) == (wanted and wanted.marks)


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

    with pytest.raises(errors.ConfigError, match="--dyn-reasoning-parser: expected one of basic, "):
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
