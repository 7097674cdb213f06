"""Every parameter that the official clients can send is honoured, or refused by the name under which it was sent."""

import gzip
import json

import anthropic
import openai
import pytest
from backports import zstd
from frontend_rig import outputs

from dynamo.frontend import pipeline
from dynamo.observability import metrics as observed
from dynamo.protocols import model_card
from dynamo.runtime.http import exchange

SAY = [{"role": "user", "content": "hi"}]
TAKEN_BY_CHATS = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "metadata": {"k": "v"},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "hi"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": True,
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "function_call": "auto",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
}
REFUSED_BY_CHATS = {
    "audio": {"format": "wav", "voice": "ash"},
    "functions": [{"name": "f"}],
    "moderation": {"model": "x"},
    "modalities": ["text", "audio"],
    "top_logprobs": 1,
    "web_search_options": {},
}
TAKEN_BY_COMPLETIONS = {
    "best_of": 1,
    "echo": True,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "max_tokens": 5,
    "n": 1,
    "presence_penalty": 0.5,
    "seed": 1,
    "stop": "x",
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "u",
}
TAKEN_BY_MESSAGES = {
    "cache_control": {"type": "ephemeral"},
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "stop_sequences": ["x"],
    "system": "be kind",
    "thinking": {"type": "disabled"},
    "tools": [],
    "tool_choice": {"type": "auto"},
    "inference_geo": "eu",
}
OF_THE_BETA = {
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "fallback_credit_token": "t",
    "fallbacks": [{"model": "n"}],
    "speed": "standard",
    "user_profile_id": "u",
    "workspace_id": "w",
}
REFUSED_BY_MESSAGES = {
    "compaction": {"type": "compaction"},
    "container": "c",
    "mcp_servers": [{"type": "url", "url": "x", "name": "n"}],
}


@pytest.fixture
async def gpt(rig):
    async with openai.AsyncOpenAI(
        base_url=rig.frontend.url + "/v1", api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def claude(rig):
    async with anthropic.AsyncAnthropic(
        base_url=rig.frontend.url, api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.mark.parametrize("name", TAKEN_BY_CHATS)
async def test_chat_accepts_the_parameter(gpt, name):
    fields = {name: TAKEN_BY_CHATS[name]}
    answer = await gpt.chat.completions.create(model="m", messages=SAY, **fields)

    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize("name", REFUSED_BY_CHATS)
async def test_chat_refuses_the_parameter_by_name(gpt, name):
    fields = {name: REFUSED_BY_CHATS[name]}
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.chat.completions.create(model="m", messages=SAY, **fields)

    assert caught.value.param.startswith(name)
    assert name in caught.value.message


@pytest.mark.parametrize("name", TAKEN_BY_COMPLETIONS)
async def test_completion_accepts_the_parameter(gpt, name):
    fields = {name: TAKEN_BY_COMPLETIONS[name]}
    answer = await gpt.completions.create(model="m", prompt="hi ", **fields)

    assert answer.choices[0].text == ("hi hello" if name == "echo" else "hello")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"background_options": {"completion_window": "soonest"}}),
        ("/v1/responses/input_tokens", {"personality": "friendly"}),
    ],
)
async def test_strict_frontend_accepts_options_that_only_openais_servers_need(bare, path, fields):
    await bare.start(unknown_parameters="refuse")
    await bare.worker()
    answer = await bare.client.post(path, json={"model": "m", "input": "hi", **fields})

    assert answer.status_code == 200, answer.text


async def test_completion_refuses_a_suffix(gpt):
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.completions.create(model="m", prompt="hi", suffix="s")

    assert caught.value.param == "suffix"


async def test_infill_model_completes_before_a_suffix(gpt, rig):
    able = model_card.ModelRuntimeConfig(infill_format="codestral")
    worker = await rig.worker("coder", runtime_config=able)
    answer = await gpt.completions.create(model="coder", prompt="hi", suffix="s")

    assert answer.choices[0].text == "hello"
    assert worker.prompts == ["[SUFFIX]s[PREFIX]hi"]


@pytest.mark.parametrize("prompt", ["hi", ["hi", "hi"], [104, 105], [[104, 105], [104]]])
async def test_completion_prompt_has_four_forms(gpt, prompt):
    answer = await gpt.completions.create(model="m", prompt=prompt)

    assert len(answer.choices) == (2 if prompt in (["hi", "hi"], [[104, 105], [104]]) else 1)


@pytest.mark.parametrize("name", TAKEN_BY_MESSAGES)
async def test_message_accepts_the_parameter(claude, name):
    fields = {name: TAKEN_BY_MESSAGES[name]}
    answer = await claude.messages.create(model="m", max_tokens=9, messages=SAY, **fields)

    assert answer.content[0].text == "hello"
    assert answer.usage.service_tier == "standard"


async def test_strict_frontend_accepts_what_only_anthropics_servers_need(bare):
    await bare.start(unknown_parameters="refuse")
    await bare.worker()
    body = {"model": "m", "messages": SAY, **OF_THE_BETA}
    counted = await bare.client.post(
        "/v1/messages/count_tokens", json=body | {"compaction": {"type": "compaction"}}
    )
    answer = await bare.client.post("/v1/messages", json=body | {"max_tokens": 9})

    assert (counted.status_code, answer.status_code) == (200, 200), counted.text + answer.text


async def test_schema_of_older_clients_is_that_of_the_answer(rig):
    able = model_card.ModelRuntimeConfig(supports_guided=True)
    guided = await rig.worker("g", runtime_config=able)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = {"type": "json_schema", "schema": schema}
    body = {"model": "g", "messages": SAY, "max_tokens": 9}
    for fields in ({"output_format": expected}, {"output_config": {"format": expected}}):
        answer = await rig.client.post("/v1/messages", json=body | fields)
        assert answer.status_code == 200, answer.text
    older, newer = [each.sampling_options.guided_decoding for each in guided.requests]

    assert older is not None
    assert older == newer


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
async def test_message_accepts_parameters_of_older_clients(claude, rig, name):
    await claude.messages.create(
        model="m", max_tokens=9, messages=SAY, extra_body={name: {"top_k": 7}.get(name, 0.25)}
    )

    assert getattr(rig.one.requests[0].sampling_options, name) in (7, 0.25)


@pytest.mark.parametrize("name", REFUSED_BY_MESSAGES)
async def test_message_refuses_the_parameter_by_name(claude, name):
    fields = {name: REFUSED_BY_MESSAGES[name]}
    with pytest.raises(anthropic.BadRequestError, match=name):
        await claude.messages.create(model="m", max_tokens=9, messages=SAY, extra_body=fields)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUE="}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
    ],
)
async def test_message_with_an_image_or_document_is_refused(claude, block):
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    taken = [{"role": "user", "content": [text]}]
    await claude.messages.create(model="m", max_tokens=9, messages=taken)
    refused = [{"role": "user", "content": [text, block]}]

    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[1\]"):
        await claude.messages.create(model="m", max_tokens=9, messages=refused)


async def test_unknown_parameter_is_named_in_a_header_and_counted(rig):
    answer = await rig.chat(foo=1, nvext={"a\r\nb": 2})
    metrics = await rig.metrics()

    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert answer.headers["x-dynamo-ignored-parameters"] == "foo, nvext.a??b"
    assert metrics["dynamo_frontend_ignored_parameters_total"] == 2


async def test_unknown_field_of_a_block_is_ignored_where_tokens_are_counted(rig):
    block = {"type": "text", "text": "hi", "foo": 1}
    body = {"model": "m", "messages": [{"role": "user", "content": [block]}]}
    answer = await rig.client.post("/v1/messages/count_tokens", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-dynamo-ignored-parameters"] == "messages[0].content[0].foo"


async def test_unknown_parameters_of_a_batch_are_named_in_a_header(bare, tmp_path):
    await bare.start(files_dir=str(tmp_path / "files"))
    form = {"files": {"file": ("lines.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    kept = (await bare.client.post("/v1/files", **form)).json()
    rule = {"anchor": "created_at", "seconds": 3600, "foo": 1}
    asked = {"input_file_id": kept["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = await bare.client.post(
        "/v1/batches", json=asked | {"output_expires_after": rule, "bar": 1}
    )

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-dynamo-ignored-parameters"] == "bar, output_expires_after.foo"


async def test_known_parameters_have_no_header(rig):
    assert "x-dynamo-ignored-parameters" not in (await rig.chat(max_tokens=6.0, foo=None)).headers


async def test_strict_frontend_refuses_unknown_parameters_that_are_not_null(bare):
    await bare.start(unknown_parameters="refuse")
    await bare.worker()
    answer, accepted = await bare.chat(foo=1, bar=None), await bare.chat(bar=None)

    assert (answer.status_code, accepted.status_code) == (400, 200)
    assert answer.json()["error"]["message"] == "Unsupported parameter(s): `foo`"


async def test_last_message_is_continued(rig):
    messages = [*SAY, {"role": "assistant", "content": "The capital"}]
    await rig.client.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": messages, "continue_final_message": True},
    )
    await rig.client.post(
        "/v1/messages", json={"model": "m", "messages": messages, "max_tokens": 5}
    )

    assert [prompt.endswith("The capital") for prompt in rig.one.prompts] == [True, True]


async def test_template_of_a_request_replaces_the_models(rig):
    await rig.chat(chat_template="{{ messages[0].content }} and {{ documents[0].text }}",
                   documents=[{"text": "more"}])  # fmt: skip
    broken = await rig.chat(chat_template="{% for %}")

    assert rig.one.prompts == ["hi and more"]
    assert broken.json()["error"]["param"] == "chat_template"


async def test_options_of_vllm_reach_the_engine(rig):
    answer = await rig.complete(
        "hello there", truncate_prompt_tokens=5, allowed_token_ids=[104], bad_words=["x"],
        stop=["l"], include_stop_str_in_output=True,
    )  # fmt: skip
    sampling = rig.one.requests[0].sampling_options

    assert rig.one.prompts == ["there"]
    assert (sampling.allowed_token_ids, sampling.logit_bias) == ((104,), {120: -100.0})
    assert answer.json()["choices"][0]["text"] == "hel"


async def test_prompt_is_truncated_at_the_side_that_the_request_names(rig):
    fields = {"truncate_prompt_tokens": 5, "max_tokens": 4}
    for side in ("left", "right"):
        await rig.complete("hello there", truncation_side=side, **fields)
        await rig.chat("hello there", truncation_side=side, **fields)

    assert rig.one.prompts == ["there", "here\n", "hello", "user:"]


async def test_bad_word_of_several_tokens_is_refused(rig):
    answer = await rig.complete(bad_words=["several"])

    assert answer.json()["error"]["param"] == "bad_words[0]"


async def test_completion_stream_keeps_the_request_id_of_the_caller(rig):
    answer = await rig.client.post(
        "/v1/completions",
        json={
            "model": "m",
            "prompt": "x",
            "stream": True,
            "nvext": {"annotations": ["request_id"]},
        },
        headers={"x-dynamo-request-id": "mine"},
    )

    assert answer.text.startswith('event: request_id\n: "mine"\n\n')
    assert answer.headers["x-request-id"] == "mine"


async def test_models_are_listed_in_anthropics_form(claude):
    page = await claude.models.list()
    one = await claude.models.retrieve("m")

    assert [model.id for model in page.data] == ["m"]
    assert (one.type, one.created_at.year) == ("model", 2023)
    assert one.model_fields_set == set(anthropic.types.ModelInfo.model_fields)


async def test_message_has_all_fields_of_anthropics_type(claude):
    message = await claude.messages.create(model="m", max_tokens=9, messages=SAY)

    assert message.model_fields_set == set(anthropic.types.Message.model_fields)


async def test_unknown_encoding_of_a_body_is_a_415_that_names_it(rig):
    answer = await rig.client.post(
        "/v1/completions",
        content=b"x",
        headers={"content-encoding": "br", "content-type": "application/json"},
    )

    assert answer.status_code == 415
    assert "'br'" in answer.json()["error"]["message"]


async def test_compressed_body_is_answered(rig):
    rig.one.script = outputs("hi", "eos")
    body = {"model": "m", "prompt": "x", "max_tokens": 5, "user": "y" * 20_000}
    for encoding, compress in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        answer = await rig.client.post(
            "/v1/completions",
            content=compress(json.dumps(body).encode()),
            headers={"content-encoding": encoding, "content-type": "application/json"},
        )

        assert answer.json()["choices"][0]["text"] == "hi"


async def test_version_and_ping_answer(rig):
    assert (await rig.client.get("/version")).json()["version"]
    assert (await rig.client.get("/ping")).status_code == 200


def test_of_unknown_parameters_only_those_that_are_shown_are_read():
    unknown = pipeline.UnknownParameters(observed.Registry("test"), refuses=False)
    request = exchange.Request(method="POST", path="/", query="", headers={}, body=b"", peer="")
    client = exchange.Exchange(request, exchange.NoConnection(), lambda: None)
    names = [*map(str, range(pipeline.MAX_IGNORED_SHOWN)), *[None] * 1_000_000]

    unknown.report(client, names)

    ((_, shown),) = client.headers
    assert shown.endswith("18, 19, ...")
