"""Markdown on a terminal: whole words, styles, and code as it is."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli import markdown

BOLD, ITALIC, CODE, END = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[0m"


def shown(text, width=40, *, has_styles=True, pieces=None):
    writer = markdown.MarkdownWriter(width, has_styles=has_styles)
    return "".join([*map(writer.push, pieces or [text]), writer.finish()])


@pytest.mark.parametrize("has_styles", [False, True])
def test_words_wrap_whole(has_styles):
    text = "one two three four five six seven eight nine ten eleven twelve"

    assert shown(text, 20, has_styles=has_styles) == (
        "one two three four\nfive six seven eight\nnine ten eleven\ntwelve"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**bold** text", f"{BOLD}bold{END} text"),
        ("a **two words**.", f"a {BOLD}two words{END}."),
        ("*it* and _it_", f"{ITALIC}it{END} and {ITALIC}it{END}"),
        ("***both***", f"{BOLD}{ITALIC}both{END}{ITALIC}{END}"),
        ("run `a * b`, now", f"run {CODE}a * b{END}, now"),
        ("2*3*4 and snake_case_name", "2*3*4 and snake_case_name"),
        ("a * b", "a * b"),
        ("## Head line\ntext", f"\x1b[1;4mHead line{END}\ntext"),
        ("* one\n- two", "• one\n• two"),
        ("```python\nx = 1  # **no**\n```\n", f"{CODE}x = 1  # **no**\n{END}"),
        ("**open\nnext", f"{BOLD}open{END}\nnext"),
        ("```python title=x.py\n*no*\n``` \n*it*", f"{CODE}*no*\n{END}{ITALIC}it{END}"),
        ("```\nx = 1\n```", f"{CODE}x = 1\n{END}"),  # as most answers end
        ("```\nx = 1", f"{CODE}x = 1{END}"),
        ("**open", f"{BOLD}open{END}"),
    ],
)
def test_marks_become_styles(text, expected):
    assert shown(text) == expected


def test_without_styles_marks_stay():
    text = "## **a** `b`\n```\nc\n```\n* d"

    assert shown(text, has_styles=False) == text


def test_code_is_not_wrapped():
    line = "x = " + "very_long " * 20 + "end"

    assert shown(f"```\n{line}\n```\n", 20).startswith(CODE + line)


def test_wide_characters_wrap_within_the_width():
    assert shown("\u4f60" * 25, 20) == "\n".join(["\u4f60" * 10, "\u4f60" * 10, "\u4f60" * 5])


def test_word_is_shown_as_soon_as_it_is_complete():
    writer = markdown.MarkdownWriter(40, has_styles=True)

    assert (writer.push("hel"), writer.push("lo wor"), writer.finish()) == ("", "hello", " wor")


@given(st.text(st.sampled_from("ab *_`#-\n\t"), max_size=60), st.integers(20, 30), st.booleans())
def test_cuts_do_not_change_what_is_shown(text, width, has_styles):
    whole = shown(text, width, has_styles=has_styles)

    assert shown(text, width, has_styles=has_styles, pieces=list(text)) == whole


@given(st.text(st.sampled_from("abc \n"), max_size=200), st.integers(20, 30))
def test_no_line_is_longer_than_the_terminal_and_no_text_is_lost(text, width):
    written = shown(text, width)

    assert re.sub(r"\s", "", written) == re.sub(r"\s", "", text)
    assert all(len(line.rstrip()) <= width for line in written.splitlines())


@pytest.mark.parametrize("mark", ["", "```\n"])
def test_control_characters_of_an_answer_command_no_terminal(mark):
    answer = f"{mark}a\x1b]52;c;aGk=\x07b\x9b2J\r\n\x7fc\x00 d"

    assert shown(answer, has_styles=False) == f"{mark}a]52;c;aGk=b2J\nc d"
