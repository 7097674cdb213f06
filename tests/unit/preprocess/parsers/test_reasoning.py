"""Reasoning in each format, and text that only resembles it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser_rig import ONE_CALL, PARIS, content, joined, make_parser, read, with_whole_calls

from dynamo.preprocess.parsers import formats, parser

MARKED = [name for name, form in formats.REASONING_FORMATS.items() if form.opens]


def thought(text):
    return parser.Reasoning(text)


@pytest.mark.parametrize("name", MARKED)
def test_reasoning_is_separated_from_the_answer(name):
    form = formats.REASONING_FORMATS[name]
    text = f"{form.opens[0]}\nLet me see.\n\n{form.closes[0]}\n\nIt is 4.\n"

    assert read(make_parser(reasoning=name), text) == [
        thought("Let me see."),
        content("It is 4.\n"),
    ]


@pytest.mark.parametrize("name", MARKED)
def test_reasoning_opened_by_the_prompt_is_reasoning(name):
    form = formats.REASONING_FORMATS[name]
    made = make_parser(reasoning=name, prompt=f"assistant\n{form.opens[0]}\n")

    assert read(made, f"hm{form.closes[0]}4") == [thought("hm"), content("4")]


@pytest.mark.parametrize("name", MARKED)
def test_reasoning_closed_by_the_prompt_is_over(name):
    form = formats.REASONING_FORMATS[name]
    prompt = f"assistant\n{form.opens[0]}\n\n{form.closes[0]}\n\n"

    assert read(make_parser(reasoning=name, prompt=prompt), "just 4") == [content("just 4")]


@pytest.mark.parametrize("name", ["deepseek_r1", "step3", "mistral", "nemotron_nano"])
def test_forced_format_reasons_without_an_opening_mark(name):
    assert read(make_parser(reasoning=name), "  I wonder ") == [thought("I wonder ")]


@pytest.mark.parametrize("name", ["basic", "qwen3", "granite", "kimi"])
def test_other_formats_do_not_reason_without_an_opening_mark(name):
    assert read(make_parser(reasoning=name), "  I wonder ") == [content("  I wonder ")]


def test_marks_later_in_an_answer_are_content():
    text = "Use <think> and </think>."

    assert read(make_parser(reasoning="basic"), text) == [content(text)]
    assert read(make_parser(reasoning="basic"), "<think>a</think>" + text) == [
        thought("a"),
        content(text),
    ]


def test_reasoning_that_never_ends_is_reasoning():
    assert read(make_parser(reasoning="basic"), "<think>on and on </thi") == [
        thought("on and on </thi")
    ]


def test_empty_reasoning_has_no_event():
    assert read(make_parser(reasoning="qwen3"), "<think>\n\n</think>\n\nHi") == [content("Hi")]


def test_reasoning_is_returned_as_it_comes():
    made = make_parser(reasoning="basic")
    told = [list(made.push(piece)) for piece in ("<think>", "one ", "two", " </", "think>", "\n!")]

    assert told == [[], [thought("one")], [thought(" two")], [], [], [content("!")]]


def test_parser_is_plain_after_reasoning():
    made = make_parser(reasoning="basic")
    seen = []
    for piece in ("<think>", "hm", "</think>", "\n", "4"):
        made.push(piece)
        seen.append((made.is_reasoning, made.is_plain))

    assert seen == [(True, False), (True, False), (False, False), (False, False), (False, True)]


def test_call_within_reasoning_is_reasoning():
    text = f"<think>maybe {ONE_CALL['hermes']}?</think>\n{ONE_CALL['hermes']}"
    told = read(make_parser("hermes", "basic"), text)

    assert told == [thought(f"maybe {ONE_CALL['hermes']}?"), PARIS]


FRAMED = [("ernie45", "response"), ("hunyuan_a13b", "answer")]


@pytest.mark.parametrize(("name", "tag"), FRAMED)
def test_marks_around_the_answer_are_no_content(name, tag):
    text = f"<think>\nhm\n</think>\n\n<{tag}>\nIt is 4.\n\nYes.\n</{tag}>\n"
    told = [thought("hm"), content("It is 4.\n\nYes.")]

    assert read(make_parser(reasoning=name), text) == told
    assert read(make_parser(reasoning=name), *text) == told


@pytest.mark.parametrize(("name", "tag"), FRAMED)
def test_marks_around_an_answer_without_a_thought_are_no_content(name, tag):
    made = make_parser(reasoning=name, prompt="<think>\n\n</think>\n")

    assert read(made, *f"\n<{tag}>4</{tag}>") == [content("4")]


@pytest.mark.parametrize(("name", "tag"), FRAMED)
def test_answer_that_breaks_off_within_its_marks_is_content(name, tag):
    made = [make_parser(reasoning=name, prompt="<think>") for _ in range(2)]

    assert read(made[0], *f"hm</think><{tag}>\nIt is\n</") == [thought("hm"), content("It is\n</")]
    assert read(made[1], *f"hm</think><{tag[:3]}") == [thought("hm"), content(f"<{tag[:3]}")]


@pytest.mark.parametrize("thought_before", [True, False])
def test_marks_around_an_answer_of_cohere_are_no_content(thought_before):
    text = "<|START_THINKING|>hm<|END_THINKING|>" * thought_before
    made = make_parser("cohere_command", "cohere_command")

    told = read(made, *text + "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>")

    assert told == [thought("hm")] * thought_before + [content("It is 4.")]


@pytest.mark.parametrize("call", ["", ONE_CALL["solar_open"]])
def test_turns_of_solar_are_reasoning_content_and_calls(call):
    text = "<|think|>hm<|end|><|begin|>assistant<|content|>It is 4.<|end|><|begin|>assistant" + call
    made = make_parser("solar_open", "solar_open", prompt="<|begin|>assistant")

    assert read(made, *text) == [thought("hm"), content("It is 4.")] + [PARIS] * bool(call)


def test_empty_turn_of_solars_prompt_is_over():
    made = make_parser(None, "solar_open", prompt="<|think|><|end|><|begin|>assistant")

    assert read(made, *"<|content|>It is 4.<|flush|>") == [content("It is 4.")]


@pytest.mark.parametrize("end", ["", "\n[END FINAL RESPONSE]", "\n[END FINAL RESPONSE]\n"])
@pytest.mark.parametrize("opens", ["", "Here are my reasoning steps:\n"])
def test_marks_around_an_answer_of_apriel_are_no_content(opens, end):
    prompt = "" if opens else "Here are my reasoning steps:\n"
    made = make_parser(reasoning="apriel", prompt=prompt)

    assert read(made, *f"{opens}hm\n[BEGIN FINAL RESPONSE]\nIt is 4.{end}") == [
        thought("hm"),
        content("It is 4."),
    ]


KIMI_THOUGHT = "hm<|close|>think<|sep|>"
KIMI_ANSWER = "<|open|>response<|sep|>It is 4.<|close|>response<|sep|>"
KIMI_END = "<|close|>message<|sep|>"


@pytest.mark.parametrize("tools", ["kimi_k3", None])
def test_channels_of_kimi_k3_are_reasoning_and_content(tools):
    made = make_parser(tools, "kimi_k3", prompt="<|open|>think<|sep|>")

    assert read(made, *KIMI_THOUGHT + KIMI_ANSWER + KIMI_END) == [
        thought("hm"),
        content("It is 4."),
    ]


def test_call_follows_the_answer_of_kimi_k3():
    made = make_parser("kimi_k3", "kimi_k3", prompt="<|open|>think<|sep|>")
    text = KIMI_THOUGHT + KIMI_ANSWER + ONE_CALL["kimi_k3"] + KIMI_END

    assert read(made, *text) == [thought("hm"), content("It is 4."), PARIS]


def test_answer_that_the_prompt_begins_has_no_mark_at_its_end():
    made = make_parser(reasoning="kimi_k3", prompt="<|open|>response<|sep|>")

    assert read(made, *KIMI_ANSWER.partition("<|sep|>")[2] + KIMI_END) == [content("It is 4.")]


def test_call_takes_the_place_of_a_marked_answer():
    made = make_parser("ernie45", "ernie45")

    assert read(made, *f"hm\n</think>\n\n{ONE_CALL['hermes']}\n") == [thought("hm"), PARIS]


@pytest.mark.parametrize(
    "name",
    ["kimi_k2", "qwen3_coder", "mimo", "seed_oss", "glm45", "minimax_m2", "deepseek_v4", "gemma4"],
)
@pytest.mark.parametrize("end", ["", "</think>", "\n</think>\n"])
def test_call_ends_a_thought_that_is_not_closed(name, end):
    text = f"I look. \n{ONE_CALL[name]}{end}"
    made = [make_parser(name, "basic", prompt="<think>") for _ in range(2)]

    assert read(made[0], text) == [thought("I look."), PARIS]
    assert read(made[1], *text) == [thought("I look."), PARIS]


def test_call_of_mistral_ends_a_thought_that_is_not_closed():
    text = '[THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'

    assert read(make_parser("mistral", "mistral"), *text) == [thought("I look."), PARIS]


def test_call_of_minimax_m3_ends_a_thought_that_is_not_closed():
    made = make_parser("minimax_m3", "minimax_m3", prompt="<mm:think>")

    assert read(made, *f"I look.\n{ONE_CALL['minimax_m3']}") == [thought("I look."), PARIS]


def test_mark_of_calls_in_a_thought_without_a_call_is_reasoning():
    text = "It writes <tool_call> and <function=f>.</think>4"

    assert read(make_parser("qwen3_coder", "basic", prompt="<think>"), *text) == [
        thought("It writes <tool_call> and <function=f>."),
        content("4"),
    ]


def test_call_in_a_thought_is_reasoning_for_a_request_without_tools():
    made = make_parser(None, "kimi_k25")

    assert read(made, ONE_CALL["kimi_k2"]) == [thought(ONE_CALL["kimi_k2"])]


def test_text_behind_a_call_that_ended_a_thought_is_content():
    text = f"hm{ONE_CALL['kimi_k2']}</think>\nHere it is: </think>."

    assert read(make_parser("kimi_k2", "kimi_k25"), *text) == [
        thought("hm"),
        PARIS,
        content("Here it is: </think>."),
    ]


HARMONY = (
    "<|channel|>analysis<|message|>Look it up.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
    "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    '{"city": "Paris"}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
)
TOLD = [thought("Look it up."), content("I look. "), PARIS, content("Sunny.")]


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("harmony", None), ("harmony", "gpt_oss"), ("harmony", "basic")]
)
def test_harmony_has_reasoning_and_calls(tools, reasoning):
    assert read(make_parser(tools, reasoning), HARMONY) == TOLD


@pytest.mark.parametrize("blank", [" ", ""])
def test_harmony_call_may_begin_with_its_recipient(blank):
    text = (
        f"{blank}to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris"}<|call|>'
    )

    assert read(make_parser("harmony"), text) == [PARIS]
    assert with_whole_calls(read(make_parser("harmony", whole_tools=()), *text)) == [PARIS]


def test_harmony_call_without_tools_is_content():
    told = read(make_parser(reasoning="gpt_oss"), HARMONY)

    assert told[0] == TOLD[0]
    assert 'to=functions.get_weather<|channel|>commentary json<|message|>{"city"' in told[1].text


@pytest.mark.parametrize(
    "text", ["no channel", "<|channel|>final but no message", "<|channel|>" + "x" * 300, "<|chan"]
)
def test_text_without_harmony_marks_is_content(text):
    assert read(make_parser("harmony"), text) == [content(text)]


def test_harmony_call_with_broken_arguments_is_content():
    text = ONE_CALL["harmony"].removesuffix("}")

    assert read(make_parser("harmony"), text) == [content(text)]


@pytest.mark.parametrize("tools", ["harmony", None])
@pytest.mark.parametrize(
    "header",
    [
        "<|start|>",
        "<|start|>assistant",
        "<|start|>assistant<|channel|>",
        "<|start|>assistant<|channel|>final",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json",
    ],
)
def test_harmony_header_that_the_end_cuts_off_is_no_content(header, tools):
    text = "<|channel|>analysis<|message|>hm<|end|>" + header

    assert read(make_parser(tools, "gpt_oss"), text) == [thought("hm")]
    assert read(make_parser(tools, "gpt_oss"), header.removeprefix("<|start|>assistant")) == []


def test_unfinished_harmony_analysis_is_reasoning():
    assert read(make_parser(reasoning="gpt_oss"), "<|channel|>analysis<|message|>hm") == [
        thought("hm")
    ]


@given(
    st.sampled_from(sorted(formats.REASONING_FORMATS)),
    st.booleans(),
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "a", " ", "\n", " " * 300, "<", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷",
             "Here is my thought process:", "Here's my response:", "<|channel|>", "analysis", "<|message|>",
             "final", "<|end|>", "<|start|>assistant", "commentary to=functions.f", '{"a": 1}', "<|call|>"]
        ),
        max_size=10,
    ),
    st.integers(0, 1000),
)  # fmt: skip
def test_cuts_do_not_change_reasoning(name, is_open, parts, place):
    text = "".join(parts)
    prompt = "<think>" if is_open else ""
    whole = read(make_parser(reasoning=name, prompt=prompt), text)
    at = place % (len(text) + 1)

    assert read(make_parser(reasoning=name, prompt=prompt), *text) == whole
    assert read(make_parser(reasoning=name, prompt=prompt), text[:at], text[at:]) == whole
    assert joined(whole) == whole


@pytest.mark.parametrize("name", ["basic", "granite", "kimi"])
@given(pieces=st.lists(st.text("<think>/ \nH◁,", min_size=1, max_size=8), min_size=1, max_size=4))
def test_answer_that_can_pass_is_all_content(name, pieces):
    parsers = formats.AnswerFormat(reasoning=formats.REASONING_FORMATS[name]).parsers("hi", None)

    if parsers.can_pass(pieces[0]):
        assert read(parsers.new(), *pieces) == [content("".join(pieces))]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("hi", "Yes", True),
        ("hi", " Yes", True),
        ("hi", "<", False),
        ("hi", "\n", False),
        ("<think>", "Yes", False),
    ],
)
def test_answer_can_pass_once_no_opening_mark_can_come(prompt, text, expected):
    parsers = formats.AnswerFormat(reasoning=formats.REASONING_FORMATS["basic"]).parsers(
        prompt, None
    )

    assert parsers.can_pass(text) is expected
