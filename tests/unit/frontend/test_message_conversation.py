"""Anthropic's requests: what is taken, what is refused, in which words, and which chat they are."""

import json

import pytest

from dynamo.base import errors
from dynamo.frontend.apis.messages import content_blocks
from dynamo.frontend.apis.messages import request as message_request
from dynamo.preprocess import images

SAY = {"role": "user", "content": "hi"}
LEAST = {"model": "m", "max_tokens": 5, "messages": [SAY]}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}


def decode(**fields):
    return message_request.decode(json.dumps(LEAST | fields).encode())


def chat(*messages, **fields):
    request = decode(messages=[*messages, SAY], **fields)
    return request.messages[:-1]


def image(data="QUE=", **source):
    described = {"type": "base64", "media_type": "image/png", "data": data, **source}
    return {"type": "image", "source": described}


def part(data, block):
    """Return the part of a chat for an image in this block."""
    return images.make_part(f"data:image/png;base64,{data}", f"{block}.source")


def result(**fields):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **fields}]}


def test_message_request_is_converted_to_a_chat_request():
    request = (
        decode(
            system="be kind", stop_sequences=["END", "STOP"], temperature=0.5, top_p=0.9, top_k=3,
            stream=True, thinking={"type": "disabled"}, metadata={"user_id": "u"},
        )
    )  # fmt: skip

    assert request.messages == [{"role": "system", "content": "be kind"}, SAY]
    assert (request.model, request.max_tokens, request.stream) == ("m", 5, True)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 3)
    assert request.stop_strings == ("END", "STOP")
    assert request.template_args == {"enable_thinking": False, "thinking": False}
    assert not request.allows_calls


def test_system_and_turns_may_be_blocks():
    text = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}

    assert chat(system=[text, {"type": "text", "text": "b"}]) == [
        {"role": "system", "content": "a\nb"}
    ]
    assert chat({"role": "user", "content": [text]}, {"role": "assistant", "content": [text]}) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]


def test_longest_time_to_live_of_any_part_is_that_of_the_prompt():
    def text(**control):
        return {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", **control}}

    cases = [
        decode(),
        decode(cache_control={"type": "ephemeral"}),
        decode(system=[text(ttl="1h")], messages=[{"role": "user", "content": [text()]}, SAY]),
        decode(
            tools=[{"name": "g", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            max_tokens=2000,
        ),
    ]

    controls = [case.extensions.cache_control for case in cases]
    assert [control and control.ttl for control in controls] == [None, "5m", "1h", "5m"]
    assert cases[3].extensions.max_thinking_tokens == 1024


def test_consecutive_turns_of_a_role_are_merged():
    messages = decode(messages=[SAY, SAY, SAY]).messages

    assert messages == [{"role": "user", "content": "hi\nhi\nhi"}]


def test_many_turns_of_a_role_are_joined_once(monkeypatch):
    joined = []
    join = content_blocks.join_contents
    monkeypatch.setattr(
        content_blocks,
        "join_contents",
        lambda *contents: joined.append(contents) or join(*contents),
    )
    request = decode(messages=[{"role": "user", "content": [image()]}, *[SAY] * 1000])

    assert len(joined) == 1
    assert len(request.messages[0]["content"]) == 1001


@pytest.mark.parametrize("as_blocks", [False, True])
def test_line_that_claude_code_changes_with_each_request_is_no_part_of_the_prompt(as_blocks):
    lines = ["x-anthropic-billing-header: cc_version=2.1.117.48f; cch=71fea;", "be kind"]
    blocks = [{"type": "text", "text": line} for line in lines]

    assert chat(system=blocks if as_blocks else "\n".join(lines)) == [
        {"role": "system", "content": "be kind"}
    ]


def test_system_turn_may_be_in_the_middle():
    assert chat(SAY, {"role": "system", "content": "x"})[1:] == [{"role": "system", "content": "x"}]


def test_tools_that_a_search_has_found_are_told_by_their_names():
    found = [{"type": "tool_reference", "tool_name": name} for name in ("look", "see")]
    *_, told = chat({"role": "assistant", "content": [USE]}, result(content=found))

    assert told["content"] == "look\nsee"


def test_tool_results_precede_the_text_of_the_user():
    called = {"role": "assistant", "content": [{"type": "text", "text": "let me see"}, USE]}
    told = result(content=[{"type": "text", "text": "sunny"}], is_error=False)

    assert chat(called, told) == [
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Paris"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sunny"},
    ]


@pytest.mark.parametrize(
    ("said", "text"), [({"content": "no"}, "no"), ({}, ""), ({"content": []}, "")]
)
def test_failed_tool_result_may_be_empty(said, text):
    called = {"role": "assistant", "content": [USE]}
    message = chat(called, result(is_error=True, **said))[1]

    assert (message["content"], message["is_error"]) == (text, True)


def test_reasoning_is_separate_from_content():
    content = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "yes"},
    ]

    assert chat({"role": "assistant", "content": content}) == [
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "a whole number from 1"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"temperature": 1.5}, "temperature", "from 0 to 1, got 1.5"),
        ({"top_p": 2}, "top_p", "from 0 to 1"),
        ({"top_k": -1}, "top_k", "from 0"),
        ({"stop_sequences": "x"}, "stop_sequences", "a list"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required, but missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens", "less than max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "from 1024"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "required"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "'enabled'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'none' or 'tool', got a string ('some')"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "with type tool"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name", "with type tool"),
        ({"container": "c"}, "container", "not supported"),
        ({"n": 2}, "n", "Unsupported parameter(s): `n`"),
    ],
)  # fmt: skip
def test_error_for_an_invalid_message_field_names_the_field(fields, param, words):
    with pytest.raises(errors.InvalidRequest) as caught:
        decode(**fields)

    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "in_chat"), [("auto", "auto"), ("none", "none"), ("any", "required")]
)
def test_tool_choice_is_converted_to_that_of_a_chat(choice, in_chat):
    named = decode(tool_choice={"type": "tool", "name": "f"})

    assert decode(tool_choice={"type": choice}).tool_choice == in_chat
    assert named.forced_tool == "f"


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_model_thinks_only_on_request(thinking, thinks):
    request = decode(thinking=thinking, max_tokens=2000)

    assert request.template_args == {"enable_thinking": thinks, "thinking": thinks}


@pytest.mark.parametrize(
    ("given", "args", "is_shown"),
    [
        ({"a": 1}, {"enable_thinking": False, "thinking": False, "a": 1}, False),
        ({"thinking": True}, {"enable_thinking": False, "thinking": True}, True),
    ],
)
def test_variables_of_the_template_may_be_given(given, args, is_shown):
    request = decode(chat_template_kwargs=given)

    assert (request.template_args, request.shows_thinking) == (args, is_shown)


def test_message_tools_are_converted_to_chat_tools():
    schema = {"type": "object", "properties": {}}
    request = (
        decode(
            tools=[
                {"name": "f", "input_schema": schema, "description": "does"},
                {"type": "custom", "name": "g", "input_schema": {}, "cache_control": {"type": "ephemeral"}},
            ],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    )  # fmt: skip

    assert request.tools == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": schema, "description": "does"},
        },
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]
    assert (request.tool_choice, request.parallel_tool_calls) == ("auto", False)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"name": "f"}, "tools[0].input_schema"),
        ({"name": "", "input_schema": {}}, "tools[0].name"),
    ],
)
def test_invalid_message_tool_is_named(tool, param):
    with pytest.raises(errors.InvalidRequest) as caught:
        decode(tools=[tool])

    assert caught.value.param == param


def test_there_are_not_too_many_tools():
    with pytest.raises(errors.InvalidRequest, match="at most 1024, got 1025"):
        decode(tools=[{"name": "f", "input_schema": {}}] * 1025)


@pytest.mark.parametrize(
    ("block", "param", "words"),
    [
        ({"type": "document"}, ".type", "'text', 'image', 'tool_result', got 'document'"),
        ({"type": "image", "source": {}}, ".source.type", "required, but missing"),
        (image("x", media_type="image/bmp"), ".source.media_type", "'image/png'"),
        (image("x", type="url"), ".source.type", "'base64'"),
        ({"type": {}}, ".type", "expected one of"),
        ({"text": "x"}, ".type", "missing"),
        ({"type": "text"}, ".text", "required, but missing"),
        ({"type": "text", "text": 5}, ".text", "a string, got 5"),
        ({"type": "text", "text": "x", "y": 1}, ".y", "Unsupported parameter(s): `messages[0].content[1].y`"),
        ({"type": "text", "text": "x", "cache_control": {"type": "z"}}, ".cache_control.type", "'ephemeral'"),
        ({"type": "tool_result", "tool_use_id": "t9"}, ".tool_use_id", "before it, got a string ('t9')"),
        (USE, ".type", "got 'tool_use'"),
    ],
)  # fmt: skip
def test_invalid_content_block_is_named(block, param, words):
    content = [{"type": "text", "text": "x"}, block]
    with pytest.raises(errors.InvalidRequest) as caught:
        decode(messages=[{"role": "user", "content": content}])

    assert caught.value.param == "messages[0].content[1]" + param
    assert words in str(caught.value)


def test_conversation_without_any_content_is_refused():
    with pytest.raises(
        errors.InvalidRequest, match=r"messages\[0\].content: expected at least one"
    ):
        decode(messages=[{"role": "user", "content": []}])


def test_images_keep_their_places_between_texts():
    words = [{"type": "text", "text": word} for word in ("one", "two")]
    content = [image("QUE="), words[0], image("QkI="), words[1]]
    (message,) = decode(messages=[{"role": "user", "content": content}]).messages

    assert message["content"] == [
        part("QUE=", "messages[0].content[0]"),
        words[0],
        part("QkI=", "messages[0].content[2]"),
        words[1],
    ]


def test_turn_with_an_image_joins_the_one_before_it():
    (message,) = decode(messages=[SAY, {"role": "user", "content": [image("QUE=")]}]).messages

    assert message["content"] == [
        {"type": "text", "text": SAY["content"]},
        part("QUE=", "messages[1].content[0]"),
    ]


def test_result_of_a_tool_may_be_an_image():
    called = {"role": "assistant", "content": [USE]}
    *_, message = chat(called, result(content=[image("QUE=")]))

    assert message["role"] == "tool"
    assert message["content"] == [part("QUE=", "messages[1].content[0].content[0]")]


def test_assistant_has_no_images():
    with pytest.raises(errors.InvalidRequest, match="got 'image'"):
        chat({"role": "assistant", "content": [image("QUE=")]})


def test_token_count_request_refuses_max_tokens():
    body = {"model": "m", "messages": [SAY]}

    assert message_request.decode_count(json.dumps(body).encode()).model == "m"
    with pytest.raises(errors.InvalidRequest, match="max_tokens"):
        message_request.decode_count(json.dumps(LEAST).encode())


def test_effort_is_converted_with_its_parameter_name():
    request = decode(output_config={"effort": "low"})

    assert request.reasoning_effort == "low"
    assert request.effort_param == "output_config.effort"
    assert decode().reasoning_effort is None


def test_empty_last_turn_of_the_assistant_is_not_continued():
    assert not decode(messages=[SAY, {"role": "assistant", "content": ""}]).continue_final_message


def test_hints_of_agents_are_taken():
    taken = decode(
        messages=[SAY, {"role": "assistant", "content": "The"}],
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        tools=[
            {"name": "f", "input_schema": {}, "strict": True, "defer_loading": True}
            | {"input_examples": [{"x": 1}], "allowed_callers": ["direct"]}
        ],
    )

    assert taken.continue_final_message
    assert not taken.shows_thinking
