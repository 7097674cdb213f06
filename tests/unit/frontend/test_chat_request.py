"""Chat requests: what is taken, what is refused, and in which words."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.apis import chat as openai_chat

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def decode(**fields):
    return openai_chat.decode(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(body):
    with pytest.raises(errors.InvalidRequest) as caught:
        openai_chat.decode(body)
    return caught.value.param, str(caught.value)


def refused_fields(**fields):
    return refused(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused_message(**message):
    return refused_fields(messages=[USER, message])


def test_chat_request_is_decoded():
    request = decode(stream=True, stream_options={"include_usage": True}, n=2, stop="x", top_p=0.5)

    assert request.messages == [USER]
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert (request.num_choices, request.stop_strings, request.top_p) == (2, ("x",), 0.5)


def test_absent_fields_have_their_defaults():
    request = decode()

    assert (request.num_choices, request.stop_strings, request.include_usage) == (1, (), False)
    assert (request.num_logprobs, request.template_args) == (None, {})


@pytest.mark.parametrize(
    "harmless",
    [
        {"temperature": None, "functions": None, "audio": None, "tools": None, "stop": None},
        {"modalities": ["text"], "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"store": False, "service_tier": "auto", "user": "u", "metadata": {"k": "v"}},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": True, "stop": []},
        {"temperature": 2, "top_p": 0, "n": 128, "top_k": -1, "presence_penalty": -2, "seed": -1},
        {"logit_bias": {"5": 100, "6": -100}, "stop": ["a", "b", "c", "d"], "max_tokens": 1},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a-1", "schema": {}, "strict": True},
            }
        },
        {"response_format": {"type": "json_object"}, "guided_decoding_backend": "auto"},
        {"prediction": {"type": "content", "content": "x"}, "verbosity": "low"},
        {"functions": [], "function_call": "auto", "top_k": 0, "nvext": {"top_k": 0}},
        {"stream_options": {"include_obfuscation": True, "continuous_usage_stats": True}},
        {"service_tier": "flex", "return_tokens_as_token_ids": True, "length_penalty": 1.0},
        {"use_beam_search": False, "skip_special_tokens": True, "top_logprobs": 0, "store": True},
        {"nvext": {"backend_instance_id": 7, "decode_worker_id": 7, "extra_fields": ["timing"]}},
        {"nvext": {"top_k": 5, "annotations": ["request_id"], "backend_instance_id": 7}},
        {"nvext": {"agent_hints": {"strict_priority": 1, "osl": 9, "speculative_prefill": True}}},
    ],
)
def test_harmless_chat_fields_are_accepted(harmless):
    assert decode(**harmless).model == "m"


def test_log_probabilities_need_two_fields():
    assert decode(logprobs=True).num_logprobs == 0
    assert decode(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert decode(logprobs=False).num_logprobs is None


def test_keys_of_logit_bias_are_token_ids():
    assert decode(logit_bias={"5": 1}).logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "temperature: expected a number from 0 to 2, got a string ('hot')"),
        ("temperature", 9, "temperature: expected a number from 0 to 2, got 9"),
        ("temperature", True, "temperature: expected a number from 0 to 2, got true"),
        ("top_p", 3, "top_p: expected a number from 0 to 1, got 3"),
        ("min_p", -0.5, "min_p: expected a number from 0 to 1, got -0.5"),
        ("presence_penalty", 2.5, "presence_penalty: expected a number from -2 to 2, got 2.5"),
        (
            "frequency_penalty",
            [],
            "frequency_penalty: expected a number from -2 to 2, got a list of 0",
        ),
        (
            "repetition_penalty",
            0,
            "repetition_penalty: expected a number above 0 and at most 2, got 0",
        ),
        ("top_k", -2, "top_k: expected a whole number from -1 to 2147483647, got -2"),
        ("n", 0, "n: expected a whole number from 1 to 128, got 0"),
        ("n", 1.5, "n: expected a whole number from 1 to 128, got 1.5"),
        ("max_tokens", 0, "max_tokens: expected a whole number from 1 to 2147483647, got 0"),
        (
            "max_tokens",
            {},
            "max_tokens: expected a whole number from 1 to 2147483647, got an object",
        ),
        ("top_logprobs", 21, "top_logprobs: expected a whole number from 0 to 20, got 21"),
        ("top_logprobs", 2, "top_logprobs: only allowed when logprobs is true"),
        (
            "stop",
            5,
            "stop: expected a string of at most 1024 characters or a list of at most 64, got 5",
        ),
        (
            "stop",
            ["a"] * 65,
            "stop: expected a string of at most 1024 characters or a list of at most 64, got a list of 65",
        ),
        ("stop", ["", "x"], "stop: expected strings of at least one character, got an empty one"),
        ("stream", "yes", "stream: expected true or false, got a string ('yes')"),
        ("logit_bias", {"a": 1}, "logit_bias: expected keys that are a whole number"),
        (
            "logit_bias",
            {"1": 101},
            "logit_bias: expected values that are a number from -100 to 100",
        ),
        (
            "metadata",
            {"k" * 65: "v"},
            "metadata: expected keys that are a string of at most 64 characters",
        ),
        (
            "metadata",
            {"k": 1},
            "metadata: expected values that are a string of at most 512 characters",
        ),
        ("model", None, "model: expected a string, got null"),
        ("messages", [], "The 'messages' field cannot be empty. At least one message is required."),
        ("messages", "Hi", "messages: expected a list of at most 100000, got a string ('Hi')"),
        (
            "tool_choice",
            "any",
            "tool_choice: expected 'auto' or 'none' or 'required' or an object, got a string ('any')",
        ),
        ("tools", [TOOL] * 1025, "tools: expected a list of at most 1024, got a list of 1025"),
        ("length_penalty", 2, "length_penalty: expected 1, got 2"),
        ("functions", [TOOL], "functions: not supported; leave it out"),
        ("use_beam_search", True, "use_beam_search: not supported; leave it out"),
        ("watermarking", True, "watermarking: not supported; leave it out"),
        ("vllm_xargs", {"a": 1}, "vllm_xargs: not supported; leave it out"),
        ("logprob_token_ids", [1], "logprob_token_ids: not supported; leave it out"),
        ("repetition_detection", {}, "repetition_detection: not supported; leave it out"),
        ("ec_transfer_params", {}, "ec_transfer_params: not supported; leave it out"),
        ("prompt_logprobs", 21, "prompt_logprobs: expected a whole number from 0 to 20, got 21"),
        ("audio", {}, "audio: not supported; leave it out"),
        (
            "guided_regex",
            "",
            "guided_regex: expected a string of 1 to 131072 characters, got a string ('')",
        ),
        (
            "allowed_token_ids",
            [],
            "allowed_token_ids: expected a list of 1 to 1024, got a list of 0",
        ),
        ("web_search_options", {}, "web_search_options: not supported; leave it out"),
        (
            "reasoning_effort",
            "huge",
            "reasoning_effort: expected 'high' or 'low' or 'max' or 'medium' or 'minimal' or 'none' "
            "or 'xhigh', got a string ('huge')",
        ),
        ("moderation", {}, "moderation: not supported; leave it out"),
        ("foo", 1, "Unsupported parameter(s): `foo`"),
    ],
)
def test_error_for_an_invalid_field_has_expected_and_actual_value(field, value, message):
    assert refused_fields(**{field: value}) == (field, message)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"b": 1, "a": 2}, "a", "Unsupported parameter(s): `a`, `b`"),
        ({"nvext": {"x": 1}}, "nvext.x", "Unsupported parameter(s): `nvext.x`"),
        (
            {"nvext": {"guided_choice": 5}},
            "nvext.guided_choice",
            "nvext.guided_choice: expected a list of at most 1024, got 5",
        ),
        (
            {"nvext": {"annotations": ["a"]}},
            "nvext.annotations[0]",
            "nvext.annotations[0]: expected 'formatted_prompt' or 'llm_metrics' or 'query_instance_id' "
            "or 'request_id' or 'token_ids', got a string ('a')",
        ),
        (
            {"prediction": {"type": "x", "content": ""}},
            "prediction.type",
            "prediction.type: expected 'content', got a string ('x')",
        ),
        (
            {"nvext": {"extra_fields": ["engine_data"]}},
            "nvext.extra_fields[0]",
            "nvext.extra_fields[0]: expected 'explanation' or 'timing' or 'worker_id', got a string ('engine_data')",
        ),
        (
            {"nvext": {"annotations": ["query_instance_id"]}},
            "nvext.annotations",
            "nvext.annotations: the answer to query_instance_id is a stream; expected stream to be true",
        ),
        (
            {"nvext": {"backend_instance_id": 1, "decode_worker_id": 2}},
            "nvext.decode_worker_id",
            "nvext.decode_worker_id: expected the same as nvext.backend_instance_id, 1, got 2",
        ),
        (
            {"nvext": {"session_control": {"session_id": "s", "action": "open"}}},
            "nvext.session_control.action",
            "nvext.session_control.action: expected 'bind', got a string ('open')",
        ),
        (
            {"nvext": {"prefill_worker_id": 5}},
            "nvext.prefill_worker_id",
            "nvext.prefill_worker_id: not supported; leave it out",
        ),
        (
            {"nvext": {"max_thinking_tokens": -5}},
            "nvext.max_thinking_tokens",
            "nvext.max_thinking_tokens: expected a whole number from 0 to 4294967295, got -5",
        ),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1]: expected a string of at most 1024 characters, got 1"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type: expected 'json_object' or 'json_schema' or 'text', got a string ('xml')",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema: expected with type json_schema, but it is missing",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
            "response_format.json_schema: expected with type json_schema, but type is text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "response_format.json_schema.name: expected a string of at most 64 characters like "
            "^[a-zA-Z0-9_-]+$, got a string ('a b')",
        ),
        (
            {"tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "tool_choice.function.name: required, but missing",
        ),
        ({"response_format": {}}, "response_format.type", "response_format.type: required, but missing"),
        ({"modalities": ["audio"]}, "modalities[0]", "modalities[0]: expected 'text', got a string ('audio')"),
        ({"seed": 10**50}, "seed", f"seed: expected a whole number from {-(2**63)} to {2**63 - 1}, got a huge number"),
        ({"user": 10**50}, "user", "user: expected a string, got a huge number"),
        ({"seed": "x" * 99}, "seed", f"seed: expected a whole number from {-(2**63)} to {2**63 - 1}, "
            f"got a string ('{'x' * 40}…')"),
        ({"a - at `$.n`": 1}, "a - at `$.n`", "Unsupported parameter(s): `a - at `$.n``"),
        ({"a - at `$.stop[7]`": 1}, "a - at `$.stop[7]`", "Unsupported parameter(s): `a - at `$.stop[7]``"),
        ({"a - at `$.nvext.x`": 1}, "a - at `$.nvext.x`", "Unsupported parameter(s): `a - at `$.nvext.x``"),
    ],
)  # fmt: skip
def test_error_names_the_path_inside_a_field(fields, param, message):
    assert refused_fields(**fields) == (param, message)


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        (b"", None, "the body is empty; expected a JSON object"),
        (b" \n", None, "the body is empty; expected a JSON object"),
        (b'{"model": "m", "mess', None, "the body is no valid JSON: Input data was truncated"),
        (b"[]", None, "the body: expected an object, got a list of 0"),
        (b'{"messages": []}', "model", "model: required, but missing"),
        (b'{"model": "m"}', "messages", "messages: required, but missing"),
        (
            b'{"model": "m", "messages": [3]}',
            "messages[0]",
            "messages[0]: expected an object, got 3",
        ),
        (b'{"messages": ' + b"[" * 100_000, None, "the body is nested too deeply"),
    ],
)
def test_malformed_body_is_refused_in_one_sentence(body, param, sentence):
    assert refused(body) == (param, sentence)


@pytest.mark.parametrize(
    ("message", "param", "sentence"),
    [
        ({}, "messages[1].role", "expected one of developer, system, user, assistant, tool, but it is missing"),
        ({"role": "zzz"}, "messages[1].role", "assistant, tool, got a string ('zzz')"),
        ({"role": 5}, "messages[1].role", "got 5"),
        ({"role": "user"}, "messages[1].content", "expected a string or a list of parts, but it is missing"),
        ({"role": "user", "content": None}, "messages[1].content", "got null"),
        ({"role": "user", "content": 5}, "messages[1].content", "got 5"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]", "expected an object, got a string ('a')"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "but it is missing"),
        ({"role": "user", "content": [{"type": "x"}]}, "messages[1].content[0].type", "expected 'text'"),
        ({"role": "user", "content": [{"type": []}]}, "messages[1].content[0].type", "expected 'text'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].image_url.url",
            "expected a string"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type", "reads text only"),
        ({"role": "assistant", "audio": {}}, "messages[1].audio", "not supported"),
        ({"role": "assistant", "function_call": {}}, "messages[1].function_call", "not supported"),
        ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls", "expected a list, got 5"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0].function", "expected an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name",
            "expected a string"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[1].tool_calls[0].function.arguments", "expected a string of JSON, got 5"),
    ],
)  # fmt: skip
def test_invalid_message_is_named(message, param, sentence):
    named, text = refused_message(**message)

    assert named == param
    assert sentence in text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
)
def test_messages_of_every_kind_are_taken(message):
    assert decode(messages=[USER, message]).messages == [USER, message]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "code"}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "function": {}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "f" * 129}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[1].function.name"),
    ],
)
def test_invalid_tool_is_named(tool, param):
    assert refused_fields(tools=[TOOL, tool])[0] == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
FIELD = st.sampled_from(openai_chat.ChatRequest.__struct_fields__)


def is_request_or_invalid(body):
    try:
        return isinstance(openai_chat.decode(body), openai_chat.ChatRequest)
    except errors.InvalidRequest as error:
        return bool(str(error))


@given(fields=st.dictionaries(FIELD | st.text(max_size=9), JSON, max_size=6))
def test_any_object_is_a_request_or_invalid(fields):
    assert is_request_or_invalid(msgspec.json.encode(fields))
    assert is_request_or_invalid(msgspec.json.encode({"model": "m", "messages": [USER]} | fields))


@given(
    message=st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "type", "text", "function"]), JSON
    ),
    role=st.sampled_from(["user", "assistant", 5]),
)
def test_any_message_is_taken_or_invalid(message, role):
    body = {"model": "m", "messages": [message | {"role": role}]}

    assert is_request_or_invalid(msgspec.json.encode(body))


@given(body=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_invalid(body):
    assert is_request_or_invalid(body)


@given(cut=st.integers(0, 200), junk=st.binary(max_size=4))
def test_mutated_body_decodes_or_raises_invalid_request(cut, junk):
    whole = msgspec.json.encode({"model": "m", "messages": [USER], "stop": ["a"], "n": 1})

    assert is_request_or_invalid(whole[:cut] + junk + whole[cut:])
    assert is_request_or_invalid(whole[:cut])


def test_root_priority_overrides_nvext_with_vllms_sign():
    hints = {"agent_hints": {"priority": 7}}

    assert decode(nvext=hints).scheduling_priority == 7
    assert decode(nvext=hints, priority=3).scheduling_priority == -3
    assert decode().scheduling_priority == 0


def test_session_control_overrides_agent_context_for_the_session_id():
    control, context = {"session_id": "a"}, {"session_id": "b", "trajectory_final": True}

    assert decode(nvext={"session_control": control, "agent_context": context}).session_id == "a"
    assert decode(nvext={"agent_context": context}).session_id == "b"
    assert decode().session_id is None
