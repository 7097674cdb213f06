"""Requests of the API become the one internal request."""

import contextlib
import json
import threading

import chat_templates
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.frontend.apis import chat as chats
from dynamo.frontend.apis import chat as openai_chat
from dynamo.frontend.apis import completions
from dynamo.frontend.apis import completions as openai_completions
from dynamo.preprocess import conversation, options, preprocessor, tokenizer_library
from dynamo.preprocess.parsers import formats
from dynamo.protocols import blocks, generate, model_errors

CONTEXT = 400


def made_of(tokenizer, source=chat_templates.CHATML, reasoning="none", tools="none"):
    return preprocessor.Preprocessor(
        tokenizer=tokenizer,
        chat_template=chat_templates.compiled(source),
        context_length=CONTEXT,
        vocab_size=tokenizer.num_ids,
        eos_token_ids=(2,),
        defaults=options.GenerationDefaults(),
        answer_format=formats.select_format(tools, reasoning, ""),
    )


@pytest.fixture(scope="module")
def byte_level_model(byte_level):
    return made_of(byte_level)


def chat(**fields):
    return openai_chat.decode(
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        ).encode()
    )


def completion(prompt, **fields):
    return openai_completions.decode(
        json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
    )


async def test_a_chat_becomes_token_ids(byte_level_model, byte_level):
    prepared = await byte_level_model.prepare_conversation(
        chat(max_tokens=5, temperature=0.5, logprobs=True, top_logprobs=2, stop="x"), "r1"
    )
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    assert (prepared.request, prepared.prompt) == (
        generate.Request(
            id="r1",
            model="m",
            token_ids=byte_level.encode_now([prompt], add_special_tokens=False)[0],
            stop_conditions=generate.StopConditions(max_tokens=5, stop=("x",)),
            sampling_options=generate.SamplingOptions(temperature=0.5),
            output_options=generate.OutputOptions(logprobs=2),
            eos_token_ids=(2,),
        ),
        prompt,
    )


async def test_an_answer_may_fill_the_context(byte_level_model):
    request = (await byte_level_model.prepare_conversation(chat(), "r")).request

    assert request.stop_conditions.max_tokens == CONTEXT - request.prompt_len


async def test_max_completion_tokens_counts_more_than_its_old_name(byte_level_model):
    request = (
        await byte_level_model.prepare_conversation(
            chat(max_tokens=9, max_completion_tokens=3), "r"
        )
    ).request

    assert request.stop_conditions.max_tokens == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_is_cut_so_that_its_answer_fits(byte_level_model, name):
    said = [{"role": "user", "content": "x " * CONTEXT}]
    request = chat(messages=said, truncate_prompt_tokens=-1, **{name: 100})
    prepared = await byte_level_model.prepare_conversation(request, "r1")

    assert prepared.request.prompt_len == CONTEXT - 100
    assert prepared.request.stop_conditions.max_tokens == 100


async def test_a_chat_that_is_too_long_names_limit_and_length(byte_level_model):
    messages = [{"role": "user", "content": "cat " * CONTEXT}]

    with pytest.raises(
        model_errors.ContextTooLong, match=rf"length is {CONTEXT} tokens.*messages"
    ) as caught:
        await byte_level_model.prepare_conversation(chat(messages=messages), "r")

    assert caught.value.param == "messages"


async def test_template_arguments_and_annotations_are_passed_on(byte_level_model):
    request = chat(
        chat_template_args={"enable_thinking": False},
        chat_template_kwargs={"enable_thinking": True},
        nvext={"annotations": ["formatted_prompt"]},
    )
    prepared = await byte_level_model.prepare_conversation(request, "r")

    assert prepared.prompt.endswith("</think>\n\n")
    assert prepared.request.annotations == ("formatted_prompt",)


async def test_empty_tool_list_is_none_in_the_template(byte_level):
    model = made_of(byte_level, "{{ tools is none }}")

    assert (await model.prepare_conversation(chat(tools=[]), "r")).prompt == "True"


def called(call_id, name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLING = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [called("a", "sun", '{"city": "Zürich"}'), called("b", "time", {})],
    },
    {"role": "tool", "tool_call_id": "b", "content": "3"},
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "tool", "tool_call_id": "z", "content": "5"},
    {"role": "assistant", "content": None, "tool_calls": [called("a", "rain", '{"n":1}')]},
    {"role": "tool", "tool_call_id": "a", "content": "6"},
]
# As DeepSeek's templates up to V3.1.
ADDED = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}"
    "{{ t['function']['name'] + '<sep>' + t['function']['arguments'] + ';' }}{% endfor %}{% endfor %}"
)
# As Kimi's.
WITH_IDS = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}"
    "{{ t['id'] }}<|tool_call_argument_begin|>{{ t['function']['arguments'] | tojson }};"
    "{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }};{% endif %}{% endfor %}"
)


async def test_arguments_are_a_text_for_a_template_that_adds_them_to_texts(byte_level):
    prepared = await made_of(byte_level, ADDED).prepare_conversation(chat(messages=CALLING), "r")

    assert prepared.prompt == 'sun<sep>{"city": "Zürich"};time<sep>{};rain<sep>{"n": 1};'


async def test_ids_of_calls_name_the_tool_for_a_template_that_writes_no_names(byte_level):
    prepared = await made_of(byte_level, WITH_IDS).prepare_conversation(chat(messages=CALLING), "r")

    assert prepared.prompt.replace("<|tool_call_argument_begin|>", " ") == (
        'functions.sun:0 {"city": "Zürich"};functions.time:1 {};functions.time:1=3;functions.sun:0=4;'
        'z=5;functions.rain:2 {"n": 1};functions.rain:2=6;'
    )


# As Mistral's.
SHORT_IDS = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}{% if t.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ t.id }} {% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call_id", ["call_Zu7SXuhJFVJlO", "a"])
async def test_id_of_another_server_is_taken_by_a_template_that_refuses_all_but_short_ones(
    byte_level, call_id
):
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [called(call_id, "sun", "{}")]},
        {"role": "tool", "tool_call_id": call_id, "content": "3"},
    ]
    model = made_of(byte_level, SHORT_IDS)
    prompt = (await model.prepare_conversation(chat(messages=messages), "r")).prompt
    of_call, of_result = prompt.removesuffix(";").split()

    assert of_call == of_result
    assert of_call.isalnum()


@pytest.mark.parametrize("test", ["!= 9", "< 9", "!=9"])
def test_template_that_tests_the_length_of_ids_needs_short_ones(test):
    source = "{% if t.id|length " + test + " %}{% endif %}"

    assert chat_templates.compiled(source).needs_short_ids
    assert not chat_templates.compiled(WITH_IDS).needs_short_ids


async def test_short_id_is_unchanged(byte_level):
    messages = [{"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "3"}]
    prepared = await made_of(byte_level, SHORT_IDS).prepare_conversation(
        chat(messages=messages), "r"
    )

    assert prepared.prompt == "a1B2c3D4e;"


# As Seed-OSS's.
WITH_PROPERTIES = (
    "{% for t in tools %}{{ t.function.name }}:{{ t.function.parameters.type }}"
    "{% for name, spec in t.function.parameters.properties.items() %} {{ name }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}, {"parameters": {"type": "object"}}])
async def test_tool_without_properties_is_shown_by_a_template_that_reads_them(
    byte_level, parameters
):
    tools = [{"type": "function", "function": {"name": "now", **parameters}}]
    model = made_of(byte_level, WITH_PROPERTIES, tools="hermes")

    assert (await model.prepare_conversation(chat(tools=tools), "r")).prompt == "now:object;"


@pytest.mark.parametrize(
    ("shown", "prompt"),
    [("m.tool_calls", "Hi;sun,rain,;3;4;"), ("m.tool_calls[:1]", "Hi;sun,;3;rain,;4;")],
)
async def test_calls_of_one_message_are_several_only_for_a_template_that_shows_one_of_each(
    byte_level, shown, prompt
):
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% for call in "
        + shown
        + " %}{{ call.function.name }},{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    calls = [called("a", "sun", "{}"), called("b", "rain", "{}")]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "tool", "tool_call_id": "b", "content": "4"},
    ]
    model = made_of(byte_level, source)

    assert (await model.prepare_conversation(chat(messages=messages), "r")).prompt == prompt


# As gpt-oss's and Llama's.
WITH_DESCRIPTIONS = "{% for t in tools %}{{ '// ' + t.function.description }};{% endfor %}"
WITH_JSON = "{% for t in tools %}{{ t.function | tojson }};{% endfor %}"


@pytest.mark.parametrize("nulls", [{}, {"description": None, "parameters": None}])
@pytest.mark.parametrize(
    ("source", "prompt"), [(WITH_DESCRIPTIONS, "// ;"), (WITH_JSON, '{"name": "now"};')]
)
async def test_tool_may_lack_a_description_or_have_null_in_its_place(
    byte_level, nulls, source, prompt
):
    tools = [{"type": "function", "function": {"name": "now", **nulls}}]
    model = made_of(byte_level, source, tools="hermes")

    assert (await model.prepare_conversation(chat(tools=tools), "r")).prompt == prompt


# As those of GLM and MiniMax.
WITH_TEXTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is iterable %}{{ m.content[0] }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
# As those of DeepSeek's first models.
WITH_NULL = (
    "{% for m in messages %}{{ 'call' if m['content'] is none else m['content'] }};{% endfor %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {}])
@pytest.mark.parametrize(("source", "prompt"), [(WITH_TEXTS, "Hi;;3;"), (WITH_NULL, "Hi;call;3;")])
async def test_content_of_a_call_is_null_only_for_a_template_that_tests_for_it(
    byte_level, source, prompt, content
):
    call = {"role": "assistant", **content, "tool_calls": [called("a", "sun", "{}")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "3"}
    request = chat(messages=[{"role": "user", "content": "Hi"}, call, result])

    assert (await made_of(byte_level, source).prepare_conversation(request, "r")).prompt == prompt


async def test_completion_prompt_gets_the_tokenizers_special_tokens(sentencepiece_like):
    (prepared,) = await completions.prepare(made_of(sentencepiece_like), completion("The cat"), "r")
    first = blocks.unpack(prepared.request.token_ids)[0]

    assert first == sentencepiece_like.id_of("<s>")
    assert prepared.request.stop_conditions.max_tokens == preprocessor.DEFAULT_COMPLETION_LEN
    assert (prepared.request.id, prepared.prompt) == ("r", "The cat")


async def test_token_ids_of_a_prompt_are_unchanged(byte_level_model):
    (prepared,) = await completions.prepare(byte_level_model, completion([5, 6], logprobs=3), "r")

    assert blocks.unpack(prepared.request.token_ids) == [5, 6]
    assert prepared.request.output_options.logprobs == 3
    assert prepared.prompt is None


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1], [2], [3]]])
async def test_several_prompts_are_several_requests(byte_level_model, prompts):
    prepared = await completions.prepare(byte_level_model, completion(prompts), "r")

    assert [one.request.id for one in prepared] == ["r-0", "r-1", "r-2"]


async def test_options_of_several_prompts_are_checked_and_made_once(byte_level_model):
    asked = completion(["a", "b"], bad_words=["x", "y"], guided_choice=["yes"])
    first, second = await completions.prepare(byte_level_model, asked, "r")

    assert first.request.sampling_options is second.request.sampling_options
    assert len(first.request.sampling_options.logit_bias) >= 2


async def test_prompts_have_a_limit_together_with_the_options_of_each(byte_level_model):
    asked = completion(["a"] * 1000, stop=["x" * 1024] * 64)

    with pytest.raises(errors.InvalidRequest, match="bytes together") as caught:
        await completions.prepare(byte_level_model, asked, "r")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [("", "at least one token"), ([[]], "at least one token"), ([10**6], "token ids from 0 to")],
)
async def test_invalid_prompt_is_refused(byte_level_model, prompt, sentence):
    with pytest.raises(errors.InvalidRequest, match=sentence) as caught:
        await completions.prepare(byte_level_model, completion(prompt), "r")

    assert caught.value.param == "prompt"


async def test_detokenized_answer_continues_the_prompt(sentencepiece_like):
    model = made_of(sentencepiece_like)
    (prepared,) = await completions.prepare(model, completion("The brave"), "r")
    token_ids = blocks.unpack(sentencepiece_like.encode_now(["cat"], add_special_tokens=False)[0])
    text = model.make_answer_text(prepared.request).push(
        generate.Output(token_ids=tuple(token_ids), finish_reason=generate.FinishReason.LENGTH)
    )

    assert text == " cat"


async def test_long_prompt_tokenized_in_a_thread_has_the_same_tokens(byte_level):
    model = made_of(byte_level)
    model.context_length = 10**6
    text = "The quick brown fox. " * (tokenizer_library.FastokensLibrary.long_text // 10)
    (prepared,) = await completions.prepare(model, completion(text), "r")

    assert model.text.decode(prepared.request.token_ids) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
KEYS = st.sampled_from(
    ["content", "name", "tool_calls", "tool_call_id", "reasoning_content", "zzz"]
)
MESSAGE = st.builds(
    lambda role, content, rest: {"content": content, **rest, "role": role},
    ROLE,
    st.text(max_size=10),
    st.dictionaries(KEYS, JSON, max_size=2),
)
FIELDS = st.dictionaries(
    st.sampled_from([*openai_chat.ChatRequest.__struct_fields__, "unheard_of"]), JSON, max_size=3
)


SOURCES = {
    "chatml": chat_templates.CHATML,
    "llama3": chat_templates.LLAMA_3,
    "mistral": chat_templates.MISTRAL,
}


@pytest.fixture(scope="module", params=SOURCES)
def any_model(request, byte_level):
    return made_of(byte_level, SOURCES[request.param])


@given(messages=st.lists(MESSAGE, min_size=1, max_size=4), fields=FIELDS)
async def test_any_chat_is_prepared_or_refused(any_model, messages, fields):
    body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
    try:
        prepared = await any_model.prepare_conversation(openai_chat.decode(body), "r")
    except errors.RequestError as error:
        assert str(error)  # noqa: PT017  # either is right, but not silence
        return
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(prepared.request), type=generate.Request)

    assert again == prepared.request


async def test_raw_prompt_skips_the_template(byte_level_model, byte_level):
    prepared = await byte_level_model.prepare_conversation(
        chat(nvext={"use_raw_prompt": True}), "r"
    )

    assert prepared.prompt == "Hi"
    assert prepared.request.token_ids == byte_level.encode_now(["Hi"], add_special_tokens=True)[0]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "assistant", "content": None}],
    ],
)
async def test_raw_prompt_must_be_one_text_message(byte_level_model, messages):
    with pytest.raises(errors.InvalidRequest, match="one message with a text") as caught:
        await byte_level_model.prepare_conversation(
            chat(messages=messages, nvext={"use_raw_prompt": True}), "r"
        )

    assert caught.value.param == "nvext.use_raw_prompt"


async def test_tokens_that_were_made_elsewhere_are_the_prompt(byte_level_model):
    given = {"nvext": {"token_data": [5, 6, 7]}}
    one = await byte_level_model.prepare_conversation(chat(**given), "r")
    (other,) = await completions.prepare(byte_level_model, completion("x", **given), "r")

    assert one.request.token_ids == other.request.token_ids == blocks.pack([5, 6, 7])
    assert one.prompt == byte_level_model.detokenize_ids([5, 6, 7])
    assert other.prompt is None


@pytest.mark.parametrize("make", ["chat", "completion"])
async def test_unknown_token_id_is_named(byte_level_model, make):
    prepare, request = {
        "chat": (chats.prepare, chat),
        "completion": (completions.prepare, lambda **f: completion("x", **f)),
    }[make]
    with pytest.raises(errors.InvalidRequest, match="token ids from 0 to") as caught:
        await prepare(byte_level_model, request(nvext={"token_data": [10**6]}), "r")

    assert caught.value.param == "nvext.token_data"


async def test_template_kwargs_of_the_request_override_the_effort(byte_level):
    model = made_of(byte_level, "{{ reasoning_effort }} {{ enable_thinking }}")
    told = await model.prepare_conversation(chat(reasoning_effort="low"), "r")
    over = await model.prepare_conversation(
        chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}), "r"
    )

    assert told.prompt == "low True"
    assert over.prompt == "low False"


async def test_thoughts_of_an_earlier_call_stand_in_a_prompt_like_that_of_gpt_oss(byte_level):
    source = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.content or '' }}{% if m.thinking %}<{{ m.thinking }}>{% endif %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    told = {"role": "tool", "content": "5", "tool_call_id": "1"}
    messages = [asked, told, {**asked, "content": "Again."}, told]
    prepared = await made_of(byte_level, source).prepare_conversation(chat(messages=messages), "r")

    assert prepared.prompt == "<hm>;5;Again.;5;"


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [("It is", None), ("<think>hm", generate.GuidedReasoning(closes=("</think>",)))],
)
async def test_grammar_waits_for_no_thought_where_a_text_is_continued(byte_level, text, thoughts):
    model = made_of(byte_level, reasoning="deepseek_r1")
    request = chat(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}],
        continue_final_message=True,
        response_format={"type": "json_object"},
    )
    prepared = await model.prepare_conversation(request, "id")

    assert prepared.request.sampling_options.guided_decoding.thoughts == thoughts


async def test_hints_go_to_the_engine(byte_level_model):
    hints = {"agent_hints": {"priority": 2, "osl": 9}, "session_control": {"session_id": "s"}}
    request = (await byte_level_model.prepare_conversation(chat(nvext=hints), "r")).request

    assert (request.priority, request.expected_output_tokens, request.session_id) == (2, 9, "s")


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({}, None),
        ({"prompt_cache_retention": "24h"}, generate.CacheHint(ttl_s=86400)),
        ({"prompt_cache_retention": "in_memory"}, generate.CacheHint(is_memory_only=True)),
        ({"nvext": {"cache_control": {}}}, generate.CacheHint(ttl_s=300)),
        (
            {"nvext": {"cache_control": {"ttl": "1h", "pin": True}}, "prompt_cache_retention": "in-memory"},
            generate.CacheHint(ttl_s=3600, is_pinned=True, is_memory_only=True),
        ),
    ],
)  # fmt: skip
async def test_wish_to_keep_blocks_goes_to_the_engine(byte_level_model, fields, hint):
    request = (await byte_level_model.prepare_conversation(chat(**fields), "r")).request

    assert request.cache_hint == hint


async def test_to_choose_the_best_takes_log_probabilities(byte_level_model):
    (best,) = await completions.prepare(byte_level_model, completion("x", best_of=3, n=2), "r")
    (scored,) = await completions.prepare(
        byte_level_model, completion("x", echo=True, logprobs=2, max_tokens=0), "r"
    )

    assert best.request.sampling_options.n == 3
    assert best.request.output_options == generate.OutputOptions(logprobs=0)
    assert scored.request.output_options == generate.OutputOptions(logprobs=2, prompt_logprobs=2)
    assert scored.request.stop_conditions.max_tokens == 1


async def test_text_that_cannot_fit_is_refused_without_tokenizing(byte_level_model):
    most = max(options.MIN_TEXT_CHARS, CONTEXT * options.CHARS_PER_TOKEN)
    text = "x" * (most + 1)
    asked = chat(messages=[{"role": "user", "content": text}])

    for made, param in (
        (byte_level_model.prepare_conversation(asked, "r1"), "messages"),
        (completions.prepare(byte_level_model, completion(["ok", text]), "r1"), "prompt"),
        (completions.prepare(byte_level_model, completion([7] * (most + 1)), "r1"), "prompt"),
        (byte_level_model.tokenize_text(text, add_special_tokens=True), "prompt"),
    ):
        with pytest.raises(
            model_errors.ContextTooLong, match=f"expected at most {most} characters"
        ) as caught:
            await made
        assert caught.value.param == param


async def test_long_text_that_might_fit_is_tokenized(byte_level_model):
    packed = await byte_level_model.tokenize_text("cat " * 20_000, add_special_tokens=True)

    assert blocks.count(packed) > CONTEXT
    with pytest.raises(model_errors.ContextTooLong, match=r"your tokens has the length"):
        byte_level_model.detokenize_ids([7] * (options.MIN_TEXT_CHARS + 1))


async def test_chat_with_more_messages_than_tokens_is_refused_without_rendering(byte_level_model):
    asked = chat(messages=[{"role": "user", "content": ""}] * (CONTEXT + 1))

    with pytest.raises(model_errors.ContextTooLong, match=f"has {CONTEXT + 1} parts"):
        await byte_level_model.prepare_conversation(asked, "r1")


async def test_tokens_beyond_the_context_are_not_made_a_text(byte_level_model, monkeypatch):
    decoded = []
    decode = byte_level_model.text.decode
    monkeypatch.setattr(
        byte_level_model.text, "decode", lambda packed: decoded.append(packed) or decode(packed)
    )
    length = byte_level_model.context_length
    given = {"nvext": {"token_data": [5] * (3 * length)}}
    with pytest.raises(errors.DynamoError, match="maximum context length"):
        await byte_level_model.prepare_conversation(chat(**given), "r")

    assert [blocks.count(packed) for packed in decoded] in ([], [length])


async def test_many_calls_are_adapted_beside_the_event_loop(byte_level_model, monkeypatch):
    adapt, threads = conversation.adapt_for_template, []

    def adapt_in_thread(*arguments, **fields):
        threads.append(threading.current_thread())
        return adapt(*arguments, **fields)

    monkeypatch.setattr(conversation, "adapt_for_template", adapt_in_thread)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for num_calls in (1, 1000):
        said = {"role": "assistant", "content": "hi", "tool_calls": [call] * num_calls}
        with contextlib.suppress(model_errors.ContextTooLong):
            await byte_level_model.prepare_conversation(chat(messages=[said]), "r")

    assert [thread is threading.main_thread() for thread in threads] == [True, False]
