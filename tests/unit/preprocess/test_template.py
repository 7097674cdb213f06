"""Chat templates: what they may use, and how their failures are reported."""

import asyncio
import gc
import threading
import weakref
from datetime import datetime

import chat_templates
import pytest

from dynamo.base import errors
from dynamo.preprocess import inputs, sandbox, template
from dynamo.testing import clock

render = chat_templates.rendered


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


STRICT = """{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System message must be first.") }}{% endif %}
{{- m.role ~ ":" ~ m.content ~ ";" }}
{%- endfor %}"""
RULE, REMINDER = (
    {"role": "system", "content": "Be kind."},
    {"role": "system", "content": "And brief."},
)


@pytest.mark.parametrize(
    "messages", [[RULE, REMINDER, USER], [RULE, USER, REMINDER], [USER, RULE, REMINDER]]
)
def test_instructions_lead_the_prompt_of_a_template_that_takes_no_others(messages):
    user = f"user:{USER['content']};"

    assert render(STRICT, messages) == f"system:Be kind.\n\nAnd brief.;{user}"
    assert render(STRICT, [RULE, USER]) == f"system:Be kind.;{user}"


DROPPING = """{% set rest = messages %}
{%- if messages[0].role == "system" %}{{ messages[0].content }}|{% set rest = messages[1:] %}{% endif %}
{%- for m in rest if m.role == "user" %}{{ m.content }};{% endfor %}"""


@pytest.mark.parametrize(
    "messages", [[RULE, REMINDER, USER], [RULE, USER, REMINDER], [USER, RULE, REMINDER]]
)
def test_instructions_lead_the_prompt_of_a_template_that_would_leave_them_out(messages):
    assert render(DROPPING, messages) == f"Be kind.\n\nAnd brief.|{USER['content']};"


def test_instructions_stay_where_they_are_if_the_template_takes_them():
    plain = "{% for m in messages %}{{ m.content }};{% endfor %}"

    assert render(plain, [USER, RULE]) == f"{USER['content']};Be kind.;"


def test_template_that_takes_no_instructions_refuses_them():
    refusing = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    for messages in ([RULE, USER], [RULE, REMINDER, USER]):
        with pytest.raises(errors.InvalidRequest, match="no system"):
            render(refusing, messages)


HELLO = {"role": "assistant", "content": "Hello."}


def test_neighbours_of_one_role_are_joined_for_a_template_that_wants_turns():
    said = USER["content"]
    messages = [USER, USER, HELLO, HELLO, USER]

    assert render(chat_templates.MISTRAL, messages) == (
        f"<s>[INST] {said}\n\n{said}[/INST] Hello.\n\nHello.</s>[INST] {said}[/INST]"
    )


def test_instructions_among_neighbours_lead_for_a_template_that_wants_turns():
    prompt = render(chat_templates.MISTRAL, [USER, REMINDER, USER])

    assert prompt == f"<s>[INST] And brief.\n\n{USER['content']}\n\n{USER['content']}[/INST]"


# As Mistral's with tools.
ALTERNATING = """{%- set turn = namespace(number=0) %}
{%- for m in messages %}
{%- if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}
{%- if (m.role == "user") != (turn.number % 2 == 0) %}{{ raise_exception("must alternate") }}{% endif %}
{%- set turn.number = turn.number + 1 %}
{%- endif %}
{{- m.role }}:{{ m.content }};
{%- endfor %}"""


def test_user_may_speak_behind_a_result_to_a_template_that_wants_turns():
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "3"},
        {"role": "user", "content": "Now?"},
    ]

    assert render(ALTERNATING, messages[:3]) == "user:Hi;assistant:;tool:3;"
    assert render(ALTERNATING, messages) == (
        "user:Hi;assistant:;tool:3;assistant:Understood.;user:Now?;"
    )


def test_neighbours_stay_apart_if_the_template_takes_them():
    assert render("{% for m in messages %}{{ m.role }};{% endfor %}", [USER, USER]) == "user;user;"


def test_special_tokens_are_variables_of_the_template():
    assert render("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}") == "<s>|</s>|False"


def test_tojson_escapes_nothing():
    source = "{{ x|tojson }} {{ x|tojson(indent=2) }}"

    assert render(source, args={"x": {"a": "<é>"}}) == '{"a": "<é>"} {\n  "a": "<é>"\n}'


def test_strftime_now_uses_the_clock():
    expected = datetime.fromtimestamp(clock.VirtualClock().wall()).strftime("%d %b %Y")  # noqa: DTZ006  # local, as everywhere

    assert render('{{ strftime_now("%d %b %Y") }}') == expected


async def test_requests_with_tools_use_their_own_template():
    both = chat_templates.compiled("plain", source_with_tools="with {{ tools|length }}")

    assert await both.render([USER]) == "plain"
    assert await both.render([USER], tools=[{"type": "function"}]) == "with 1"


def test_generation_tag_changes_nothing():
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_exception_raised_by_the_template_is_an_invalid_request():
    with pytest.raises(errors.InvalidRequest, match="must alternate") as caught:
        render(chat_templates.MISTRAL, [HELLO, USER])

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


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(template, "MAX_STEPS", 100_000)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}xx{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        (LOOPS.replace("xx", ""), "100000 steps"),
        (LOOPS.replace("xx", "x" * 999), "33554432 characters"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for x in range(99999) %}{% block b scoped %}" + LOOPS + "{% endblock %}{% endfor %}", "steps"),
        ("{{ 'a' * 5000000000 }}", "characters"),
        ("{{ 5000000000 * 'a' }}", "characters"),
        ("{{ [0] * 5000000000 }}", "items"),
        ("{{ 10 ** (10 ** 9) }}", "bits"),
        ("{{ 'a'|center(5000000000) }}", "width"),
        ("{{ 'a'.ljust(5000000000) }}", "width"),
        ("{{ 'a'|indent(5000000000, true) }}", "width"),
        ("{{ '%5000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (5000000000, 1) }}", "width"),
        ("{{ '%5000000000d'|format(1) }}", "width"),
        ("{{ '{:5000000000}'.format(1) }}", "width"),
        ("{{ '{:{}}'.format(1, 5000000000) }}", "width"),
        ("{{ [1]|tojson(indent=5000000000) }}", "width"),
        ("{{ ('a\n' * 10000)|indent(9999) }}", "characters"),
        ("{{ ('a'|e).ljust(99999) }}", "width"),
        ("{{ 'a'.encode().ljust(99999) }}", "encode"),
        ("{{ ('\t' * 9999).expandtabs(9999)|length }}", "characters"),
        ("{{ (('%(a)9999d' * 9999) % {'a': 1})|length }}", "characters"),
        ("{{ ('{0:9999}' * 9999).format(1)|length }}", "characters"),
        ("{{ ([0] * 9999)|tojson(indent=9999)|length }}", "characters"),
        ("{{ ('好' * 1100000)|list }}", "items"),
        ("{{ ('a ' * 1100000).split() }}", "items"),
        ("{{ ('a\n' * 1100000).splitlines() }}", "items"),
        ("{{ namespace(*('好' * 1100000)) }}", "items"),
        ("{{ ('a' * 1000000)|wordwrap(1) }}", "width"),
        ("{{ ('a ' * 16000000)|urlize }}", "width"),
        ("{{ ([0] * 300000)|pprint }}", "width"),
        ("{{ range(99999)|select('in', range(99999)|list)|list }}", "steps"),
        ("{{ range(99999)|reject('in', range(99999)|list)|list }}", "steps"),
        ("{{ ([{}] * 99999)|selectattr('a', 'in', range(99999)|list)|list }}", "steps"),
        ("{{ ([range(99999)] * 99999)|map('list')|list }}", "value"),
        ("{{ range(99999)|map('replace', 1, 'a' * 800)|list }}", "value"),
        ("{% set ns = namespace(l=1) %}{% set all = [ns] * 99999 %}", "namespace"),
    ],
)  # fmt: skip
def test_template_that_exceeds_a_bound_is_refused_with_the_bound(source, bound):
    with pytest.raises(errors.InvalidRequest, match=bound):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|map(attribute='content')|first|length }}",
        "{{ (messages|batch(2)|list)[0][0].content|length }}",
        "{{ messages[0].content|center(5)|length }}",
        "{{ messages[0].content|indent(2)|length }}",
        "{{ (messages|selectattr('content', 'equalto', messages[0].content)|first).content|length }}",
    ],
)
def test_filters_take_long_messages(source):
    assert render(source, [{"role": "user", "content": "x" * 20_000}]) == "20000"


@pytest.mark.parametrize(
    ("start", "longer"),
    [
        ("'ab'", "ns.x + ns.x"),
        ("'ab'", "ns.x ~ ns.x"),
        ("'ab'", "'%s%s' % (ns.x, ns.x)"),
        ("'ab'", "'{}{}'.format(ns.x, ns.x)"),
        ("'ab'", "ns.x|replace('a', 'aa')"),
        ("'ab'", "ns.x.replace('b', ns.x)"),
        ("'ab'", "[ns.x, ns.x]|join"),
        ("'ab'", "ns.x.join('xyz')"),
        ("'ab'", "twice(ns.x)"),
        ("[1]", "ns.x + ns.x"),
        ("3", "ns.x * ns.x"),
    ],
)
def test_value_that_grows_with_every_iteration_is_bounded(start, longer):
    check_growth(start, longer, "ns.x")


def test_filters_of_constants_are_bounded_and_not_computed_by_the_compiler(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_VALUE", 2**14)
    chat_template = chat_templates.compiled(
        "{{ '\\\\'" + "|tojson" * 16 + " }}"
    )  # doubles each time

    with pytest.raises(errors.InvalidRequest, match="exceeds 16384 characters"):
        asyncio.run(chat_template.render([]))


@pytest.mark.parametrize(
    "value",
    ["x * 9", "x + 'a'", "x ~ 'a'", "x[1:]", "x.upper()", "x|upper", "[0] * 9999"],
)
@pytest.mark.parametrize("block", [False, True])
def test_long_values_are_bounded_together(monkeypatch, value, block):
    monkeypatch.setattr(sandbox, "MAX_BYTES", 2**19)
    names = [f"v{number}" for number in range(99)]
    wanted = "{% set NAME %}{{ VALUE }}a{% endset %}" if block else "{% set NAME = VALUE %}"
    source = "".join(wanted.replace("NAME", name) for name in names).replace("VALUE", value)

    with pytest.raises(errors.InvalidRequest, match="together exceed 524288 bytes"):
        render("{% set x = 'ab' * 4000 %}" + source)


@pytest.mark.parametrize("longer", ["[ns.x, ns.x]", "{'a': ns.x, 'b': ns.x}"])
@pytest.mark.parametrize(
    "output", ["ns.x", "ns.x|tojson", "ns.x|string", "'%s' % [ns.x]", "'' ~ ns.x", "[ns.x]|join"]
)
def test_list_that_contains_another_one_twice_is_bounded_before_it_is_text(
    monkeypatch, longer, output
):
    monkeypatch.setattr(sandbox, "MAX_VALUE", 2**16)  # the parts of a list are counted one by one
    check_growth("[1]", longer, output)


def check_growth(start, longer, output):
    macro = "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
    begin = "{% set ns = namespace(x=" + start + ") %}{% for i in range(99) %}"
    step = "{% set ns.x = " + longer + " %}{% endfor %}{{ " + output + " }}"
    with pytest.raises(errors.InvalidRequest, match="exceeds"):
        render(macro + begin + step)


@pytest.mark.parametrize(
    "source", ["{% for i in range(99999) %}{% endfor %}", "{{ messages|sort(attribute='role') }}"]
)
def test_time_of_a_template_is_bounded(monkeypatch, source):
    monkeypatch.setattr(template, "QUICK_S", -1.0)
    monkeypatch.setattr(template, "MAX_RENDER_S", -1.0)
    with pytest.raises(errors.InvalidRequest, match="exceeds -1 s"):
        render(source)


async def test_template_of_a_request_is_never_rendered_on_the_event_loop():
    model = chat_templates.compiled("")
    source = "{{ ([{'a': 1}] * 200000)|sort(attribute='a')|length }}"
    other = await model.replaced_by(source)
    sorting = asyncio.create_task(other.render([]))
    num_turns = 0
    while not sorting.done():
        await asyncio.sleep(0)
        num_turns += 1

    assert await sorting == "200000"
    assert num_turns > 3


async def test_one_template_of_a_request_at_a_time_is_rendered_even_if_requests_are_cancelled(
    monkeypatch,
):
    model = chat_templates.compiled("")
    others = [await model.replaced_by(f"{number}") for number in range(3)]
    running, may_end = [], threading.Event()

    def render_slowly(*_):
        running.append(1)
        may_end.wait(60)
        return "prompt"

    monkeypatch.setattr(template, "_join", render_slowly)
    tasks = [asyncio.create_task(other.render([])) for other in others]
    while not running:
        await asyncio.sleep(0)
    tasks[0].cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    num_running = len(running)
    may_end.set()

    assert num_running == 1
    assert await asyncio.gather(*tasks[1:]) == ["prompt", "prompt"]


async def test_host_without_a_thread_for_a_template_is_no_fault_of_the_request(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    other = await chat_templates.compiled("").replaced_by("{{ 7 }}")
    with monkeypatch.context() as host:
        host.setattr(threading.Thread, "start", start)
        with pytest.raises(errors.Unavailable, match=r"start new thread.*ulimit -u"):
            await other.render([])

    assert await other.render([]) == "7"


async def test_event_loop_goes_on_while_a_template_takes_long():
    looping = asyncio.create_task(chat_templates.compiled(LOOPS.replace("xx", "")).render([]))
    num_turns = 0
    while not looping.done():
        await asyncio.sleep(0)
        num_turns += 1

    assert isinstance(looping.exception(), errors.InvalidRequest)
    assert num_turns > 3


@pytest.mark.parametrize(
    "source",
    [
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for i in x %}" * 30 + "{% endfor %}" * 30,
    ],
)
def test_template_that_is_nested_too_deeply_is_a_config_error(source):
    with pytest.raises(errors.ConfigError, match="chat template is"):
        chat_templates.compiled(source)


def test_very_long_template_is_a_config_error():
    with pytest.raises(errors.ConfigError, match="expected at most 1048576"):
        chat_templates.compiled("x" * (2**20 + 1))


def test_prompt_of_many_steps_is_the_same_as_that_of_few():
    messages = [{"role": "user", "content": str(i)} for i in range(20_000)]
    prompt = render("{% for message in messages %}{{ message.content }} {% endfor %}", messages)

    assert prompt == "".join(f"{i} " for i in range(20_000))


def test_malformed_template_is_a_config_error():
    with pytest.raises(errors.ConfigError, match="chat template"):
        chat_templates.compiled("{% if %}")


def test_template_says_whether_it_knows_the_developer_role():
    assert chat_templates.compiled("{% if role == 'developer' %}{% endif %}").knows_developer
    assert not chat_templates.compiled(chat_templates.CHATML).knows_developer


def test_template_that_speaks_of_developers_does_not_know_their_role():
    source = "Your defaults, unless the developer preamble says otherwise. {{ messages }}"

    assert not chat_templates.compiled(source).knows_developer


def test_template_that_leaves_a_developer_out_does_not_know_the_role():
    """As one of DeepSeek-V3.2, which asks for the role to find the last turn."""
    source = (
        "{% for m in messages %}{% if m.role in ('user', 'developer') %}{% set last = loop.index0 %}{% endif %}"
        "{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}{% endfor %}"
    )

    assert not chat_templates.compiled(source).knows_developer


@pytest.mark.parametrize(
    "test",
    [
        "message['content'] is none",
        'message["content"] is not none',
        "message.content != None",
        "message.get('content') is none",
        "content is not none",
    ],
)
def test_template_that_tests_for_null_reads_it(test):
    assert chat_templates.compiled("{% if " + test + " %}x{% endif %}").reads_null


@pytest.mark.parametrize("source", [chat_templates.CHATML, "{% if message.content %}{% endif %}"])
def test_template_without_such_a_test_reads_no_null(source):
    assert not chat_templates.compiled(source).reads_null


def test_template_that_fails_behind_its_test_for_null_reads_none():
    """As Ministral's: it tests first, and then asks for the length."""
    source = (
        "{% for m in messages %}{% if m.content is not none and m.content is string %}{{ m.content }}"
        "{% elif m.content | length > 0 %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )

    assert not chat_templates.compiled(source).reads_null


# As Llama's and gpt-oss's.
READING_ONE = "{{ m.tool_calls[0].function.name }}"
REFUSING_TWO = "{{ raise_exception('one at once') if m.tool_calls | length > 1 }}" + READING_ONE
READING_ALL = "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("reading", "expected"),
    [(REFUSING_TWO, True), (READING_ONE, True), (READING_ALL, False), ("", False)],
)
def test_template_that_does_not_take_two_calls_of_a_message_needs_single_ones(reading, expected):
    source = "{% for m in messages if m.tool_calls %}" + reading + "{% endfor %}"

    assert chat_templates.compiled(source).needs_single_calls is expected


@pytest.mark.parametrize("source", [chat_templates.CHATML, chat_templates.MISTRAL])
def test_template_that_shows_all_calls_or_none_needs_no_single_ones(source):
    assert not chat_templates.compiled(source).needs_single_calls


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


async def test_messages_are_forgotten_with_their_prompt():
    class Message(dict):
        """A message that can be referred to weakly."""

    source = "{% macro text_of(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ text_of(m) }}{% endfor %}"
    made = template.ChatTemplate(source, special_tokens={}, clock=clock.VirtualClock())
    message = Message(role="user", content="hi")
    reference = weakref.ref(message)
    gc.disable()
    try:
        prompt = await made.render([message])
        del message

        assert prompt == "hi"
        assert reference() is None
    finally:
        gc.enable()


def test_template_that_becomes_too_long_a_program_is_refused():
    """Python compiles it in one go, in which no other thread runs."""
    source = "{{ a+b+c+d+e+f+g+h }}" * 3000

    assert len(source) < inputs.MAX_TEMPLATE_CHARS
    with pytest.raises(errors.ConfigError, match="becomes a program of"):
        template.ChatTemplate(source, special_tokens={}, clock=clock.VirtualClock())
