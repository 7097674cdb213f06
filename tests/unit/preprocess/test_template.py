"""Chat templates: what they may use, and how their failures are reported."""

import time
from datetime import datetime

import chat_templates
import pytest

from dynamo.base import errors
from dynamo.preprocess import template
from dynamo.testing import clock


def render(source, messages=(), **rest):
    return chat_templates.compiled(source).render(list(messages), **rest)


USER = {"role": "user", "content": "Hi <b>&</b> 你好"}


def test_conversation_is_rendered_with_its_generation_prompt():
    assert render(chat_templates.CHATML, [USER]) == (
        "<|im_start|>user\nHi <b>&</b> 你好<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_prompt_can_be_left_out():
    assert render(chat_templates.CHATML, [USER], add_generation_prompt=False).endswith(
        "<|im_end|>\n"
    )


def test_template_arguments_of_the_request_reach_the_template():
    prompt = render(chat_templates.CHATML, [USER], args={"enable_thinking": False})

    assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_arguments_cannot_replace_messages(name):
    assert render(
        "{{ messages|length }}{{ tools }}{{ add_generation_prompt }}", args={name: 7}
    ) == ("0NoneTrue")


def test_special_tokens_are_variables_of_the_template():
    assert render("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}") == "<s>|</s>|False"


def test_tojson_escapes_nothing():
    source = "{{ x|tojson }} {{ x|tojson(indent=2) }}"

    assert render(source, args={"x": {"a": "<é>"}}) == '{"a": "<é>"} {\n  "a": "<é>"\n}'


def test_strftime_now_uses_the_clock():
    expected = datetime.fromtimestamp(clock.VirtualClock().wall()).strftime("%d %b %Y")  # noqa: DTZ006  # local, as everywhere

    assert render('{{ strftime_now("%d %b %Y") }}') == expected


def test_requests_with_tools_use_their_own_template():
    both = chat_templates.compiled("plain", source_with_tools="with {{ tools|length }}")

    assert both.render([USER]) == "plain"
    assert both.render([USER], tools=[{"type": "function"}]) == "with 1"


def test_generation_tag_changes_nothing():
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_exception_raised_by_the_template_is_an_invalid_request():
    with pytest.raises(errors.InvalidRequest, match="must alternate") as caught:
        render(chat_templates.MISTRAL, [USER, USER])

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[3].content }}",
        "{{ 'a' + 1 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ missing() }}",
        "{{ [1]|tojson(indent={}) }}",
    ],
)
def test_any_error_of_a_template_is_an_invalid_request(source):
    with pytest.raises(errors.InvalidRequest, match="chat template cannot take"):
        render(source, [])


def test_too_long_prompt_of_a_template_is_refused(monkeypatch):
    monkeypatch.setattr(template, "MAX_PROMPT_CHARS", 1000)
    begun = time.process_time()
    with pytest.raises(errors.InvalidRequest, match="exceeds 1000 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}")

    assert time.process_time() - begun < 5


def test_malformed_template_is_a_config_error():
    with pytest.raises(errors.ConfigError, match="chat template"):
        chat_templates.compiled("{% if %}")


def test_template_says_whether_it_knows_the_developer_role():
    assert chat_templates.compiled("{% if role == 'developer' %}{% endif %}").knows_developer
    assert not chat_templates.compiled(chat_templates.CHATML).knows_developer


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("messages[0].role", "user"),
        ("messages[0].nothing is defined", "False"),
        ("messages[0].nothing.more is defined", None),  # of what is not there
        ("messages[0].items() | list", "[('role', 'user'), ('content', 'Hi')]"),
        ("messages[0].__class__", ""),
        ("messages[0].update({})", None),  # nothing can be changed
    ],
)
def test_keys_and_attributes_of_messages_are_distinct(expression, text):
    source = "{{ " + expression + " }}"
    messages = [{"role": "user", "content": "Hi"}]

    if text is not None:
        assert render(source, messages) == text
    else:
        with pytest.raises(errors.InvalidRequest):
            render(source, messages)
