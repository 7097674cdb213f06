"""What is refused, and how: status and body as OpenAI's API has them."""

import json

import msgspec
import pytest
from frontend_rig import EOS, card_of, outputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo.protocols import generate, model_card

SAY = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (CHAT, {}, 400, "model", "model"),
        (CHAT, {"model": "m"}, 400, "messages", "messages"),
        (CHAT, {"model": "m", "messages": []}, 400, "messages", "At least one message"),
        (CHAT, {"model": "m", "messages": "hi"}, 400, "messages", "a list"),
        (CHAT, {"model": "m", "messages": [{"role": "zzz", "content": "x"}]}, 400, "messages[0].role", "user"),
        (CHAT, {"model": "m", "messages": SAY, "temperature": "hot"}, 400, "temperature", "'hot'"),
        (CHAT, {"model": "m", "messages": SAY, "temperature": 9}, 400, "temperature", "from 0 to 2"),
        (CHAT, {"model": "m", "messages": SAY, "n": 0}, 400, "n", "from 1 to 128"),
        (CHAT, {"model": "m", "messages": SAY, "max_tokens": 0}, 400, "max_tokens", "from 1"),
        (CHAT, {"model": "m", "messages": SAY, "logit_bias": {"999": 1}}, 400, "logit_bias", "0 to 256"),
        (CHAT, {"model": "q", "messages": SAY}, 404, "model", "'q' does not exist. Served here: 'm'"),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", "200 tokens"),
        (COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": 500}, 400, "prompt", "200 tokens"),
        (COMPLETIONS, {"model": "m", "prompt": []}, 400, "prompt", "empty list"),
        (COMPLETIONS, {"model": "m", "prompt": [999]}, 400, "prompt", "0 to 256"),
        (COMPLETIONS, {"model": "m"}, 400, "prompt", "prompt"),
    ],
)  # fmt: skip
async def test_invalid_request_names_the_wrong_field(rig, path, body, status, param, words):
    answer = await rig.client.post(path, json=body)
    error = answer.json()["error"]

    assert answer.status_code == status
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"), [(b"", "empty"), (b'{"model": "m"', "JSON"), (b"\xff", "JSON"), (b"[]", "object")]
)  # fmt: skip
async def test_body_other_than_an_object_is_refused(rig, body, words):
    headers = {"content-type": "application/json"}
    answer = await rig.client.post(CHAT, content=body, headers=headers)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_logprobs_that_the_engine_does_not_have_are_refused(rig):
    facts = model_card.ModelRuntimeConfig(supports_logprobs=False)
    await rig.worker("dumb", runtime_config=facts)
    answer = await rig.chat(model="dumb", logprobs=True)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"


async def test_more_alternatives_than_the_engine_has_are_refused(rig):
    await rig.worker("small", runtime_config=model_card.ModelRuntimeConfig(max_top_logprobs=1))
    chat = (await rig.chat(model="small", logprobs=True, top_logprobs=2)).json()["error"]
    completion = (await rig.complete("a", model="small", logprobs=2)).json()["error"]

    assert chat["message"] == "top_logprobs: expected at most 1, got 2"
    assert (chat["param"], completion["param"]) == ("top_logprobs", "logprobs")


async def test_request_before_any_worker_is_a_503(bare):
    await bare.start(worker_wait_secs=0)
    answer = await bare.chat()

    assert answer.status_code == 503
    assert "no worker has registered yet" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"


async def test_request_after_the_last_worker_left_is_a_503(impatient):
    await impatient.one.runtime.close()
    await impatient.until(lambda: not impatient.instances)
    answer = await impatient.chat()

    assert answer.status_code == 503
    assert "'m' has lost its last worker" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers


async def test_new_worker_serves_again(rig):
    await rig.one.runtime.close()
    await rig.until(lambda: not rig.instances)
    await rig.worker()

    assert (await rig.chat()).status_code == 200


async def test_workers_take_turns(rig):
    two = await rig.worker()
    for _ in range(4):
        await rig.chat()

    assert (len(rig.one.requests), len(two.requests)) == (2, 2)


async def test_models_at_one_endpoint_get_their_own_requests(rig):
    other = await rig.worker("other")
    for name in ("m", "other", "m", "other", "m", "other"):
        assert (await rig.chat(model=name)).status_code == 200

    assert {request.model for request in rig.one.requests} == {"m"}
    assert {request.model for request in other.requests} == {"other"}


async def test_request_can_name_an_instance(rig):
    two = await rig.worker()
    for _ in range(3):
        await rig.chat(nvext={"backend_instance_id": two.runtime.instance_id})

    assert len(two.requests) == 3


async def test_request_for_an_absent_instance_is_a_503(rig):
    answer = await rig.chat(nvext={"backend_instance_id": 42})

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "'m' has no worker 42: choose another"


@pytest.mark.parametrize("name", ["x-request-id", "x-dynamo-request-id"])
async def test_request_id_of_the_caller_is_returned_and_sent_to_the_worker(rig, name):
    answer = await rig.client.post(
        CHAT, json={"model": "m", "messages": SAY}, headers={name: "mine-1"}
    )

    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-dynamo-request-id"] == "mine-1"
    assert rig.one.calls[0].headers["x-request-id"] == "mine-1"


async def test_malformed_request_id_is_replaced(rig):
    answer = await rig.client.post(
        CHAT, json={"model": "m", "messages": SAY}, headers={"x-request-id": "a b"}
    )

    assert answer.headers["x-request-id"] == answer.json()["id"].removeprefix("chatcmpl-")


async def test_refused_request_has_an_id(rig):
    assert (await rig.chat(n=0)).headers["x-request-id"]


async def test_sampling_and_stops_reach_the_worker(rig):
    await rig.chat(
        temperature=0.5, top_p=0.9, seed=7, max_completion_tokens=3, stop="x", n=2,
        presence_penalty=1, frequency_penalty=-1, logit_bias={"104": 5}, min_tokens=1,
    )  # fmt: skip
    request = rig.one.requests[0]

    assert request.sampling_options == generate.SamplingOptions(
        n=2, temperature=0.5, top_p=0.9, seed=7, presence_penalty=1, frequency_penalty=-1,
        logit_bias={104: 5},
    )  # fmt: skip
    assert request.stop_conditions == generate.StopConditions(
        max_tokens=3, min_tokens=1, stop=("x",)
    )
    assert request.eos_token_ids == (EOS,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
FIELDS = ["model", "messages", "prompt", "n", "stop", "stream", "logprobs", "top_logprobs", "temperature",
          "max_tokens", "seed", "logit_bias", "nvext", "stream_options", "tools", "echo"]  # fmt: skip


@pytest.mark.parametrize("reference", [{"type": []}, {"function": {"name": ["look"]}}, {}])
async def test_allowed_tool_of_no_name_allows_none(rig, reference):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [reference]}}
    answer = await rig.chat(
        tools=[{"type": "function", "function": {"name": "look"}}], tool_choice=choice
    )

    assert answer.status_code == 200


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values),
)
async def test_no_body_is_answered_by_a_5xx(rig, path, fields):
    rig.one.script = [
        one for index in range(4) for one in outputs("ok", index=index)
    ]  # more choices than that are not asked for below
    fields["n"] = min(fields.get("n"), 4) if isinstance(fields.get("n"), int) else fields.get("n")
    whole = {"model": "m", "messages": SAY} if path == CHAT else {"model": "m", "prompt": "x"}
    body = msgspec.json.encode({**whole, **fields})
    answer = await rig.client.post(path, content=body, headers={"content-type": "application/json"})

    assert answer.status_code < 500
    if answer.status_code != 200:
        assert json.loads(answer.text)["error"]["message"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=60))
async def test_no_bytes_are_answered_by_a_5xx(rig, body):
    answer = await rig.client.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400


def test_card_of_the_test_rig_lists_the_files_of_a_worker(model_dir):
    assert set(card_of(model_dir).files) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
