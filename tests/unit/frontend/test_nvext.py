"""The nvext object of responses, and the headers and hints that name the worker of a request."""

import json

import pytest
from frontend_rig import events

from dynamo.base import errors
from dynamo.frontend import metrics, nvext
from dynamo.observability import metrics as observed
from dynamo.preprocess import detokenize, preprocessor
from dynamo.protocols import generate
from dynamo.router import config
from dynamo.testing import clock as clocks

METER = metrics.RequestMeter(
    metrics.FrontendMetrics(observed.Registry("test"), lambda: 0.0).for_model("m"),
    "chat",
    is_stream=True,
)


def chunks(answer):
    return [event for event in events(answer.text) if event != "[DONE]"]


async def test_times_are_in_milliseconds_from_arrival():
    clock = clocks.VirtualClock()
    one = nvext.NvextResponse(["timing"], clock)
    counted = []
    count = one.wrap_counter(lambda choice, num: counted.append((choice, num)))
    for num_tokens, pause_s in ((1, 0.5), (2, 0.2), (2, 0.2)):
        await clock.advance(pause_s)
        count("c", num_tokens)
    await clock.advance(0.1)
    timing = one.build_fields(METER, is_last=True, cached_share=0.25)["nvext"]["timing"]

    assert counted == [("c", 1), ("c", 2), ("c", 2)]
    assert round(timing["ttft_ms"]) == 500
    assert round(timing["itl_ms"]) == 100
    assert round(timing["total_time_ms"]) == 1000
    assert timing["kv_hit_rate"] == 0.25
    assert one.build_fields(METER, is_last=False) == {}


def test_answer_of_one_token_has_no_inter_token_time():
    one = nvext.NvextResponse(["timing"], clocks.VirtualClock())
    one.wrap_counter(lambda *_: None)("c", 1)

    assert one.build_fields(METER, is_last=True)["nvext"]["timing"]["itl_ms"] is None


async def test_whole_answer_has_its_worker_and_times(rig):
    answer = await rig.chat(nvext={"extra_fields": ["worker_id", "timing"]})
    told = answer.json()["nvext"]
    worker = rig.one.instance.instance_id

    assert told["worker_id"] == {"prefill_worker_id": worker, "decode_worker_id": worker}
    assert told["timing"].keys() == {
        "request_received_ms", "ttft_ms", "itl_ms", "total_time_ms", "kv_hit_rate",
    }  # fmt: skip
    assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] > 0


async def test_times_say_how_many_tokens_were_loaded_from_which_tier(rig):
    loaded = generate.Output((104,), cached_tokens=4, tier_tokens=(("host", 4),))
    rig.one.script = [loaded, generate.Output((105,), generate.FinishReason.LENGTH)]
    answer = await rig.chat(nvext={"extra_fields": ["timing"]})

    assert answer.json()["nvext"]["timing"]["kv_tier_tokens"] == {"host": 4}


async def test_nvext_is_absent_unless_requested(rig):
    assert "nvext" not in (await rig.chat()).json()
    assert "nvext" not in (await rig.chat(stream=True)).text


async def test_each_chunk_has_the_worker_and_the_last_has_the_times(rig):
    answer = await rig.chat(stream=True, nvext={"extra_fields": ["worker_id", "timing"]})
    found = [chunk["nvext"] for chunk in chunks(answer)]

    assert len(found) == 6
    assert all(one["worker_id"] == found[0]["worker_id"] for one in found)
    assert ["timing" in one for one in found] == [False] * 5 + [True]


async def test_continuous_usage_comes_with_every_chunk(rig):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await rig.complete("hi", stream=True, stream_options=options)
    found = chunks(answer)

    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3, 4, 5, 5, 5]
    assert [len(chunk["choices"]) for chunk in found] == [1] * 6 + [0]
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == "hello"


async def test_metrics_annotation_comes_before_each_chunk(rig):
    rig.one.script = [
        generate.Output((97,)),
        generate.Output((98, 99), generate.FinishReason.LENGTH),
    ]
    answer = await rig.complete("hi", stream=True, nvext={"annotations": ["llm_metrics"]})
    parts = answer.text.split("\n\n")
    told = [
        json.loads(json.loads(part.partition("\n: ")[2]))
        for part in parts
        if part.startswith("event: llm_metrics\n")
    ]

    assert told == [
        {"input_tokens": 2, "output_tokens": 1, "chunk_tokens": 1},
        {"input_tokens": 2, "output_tokens": 3, "chunk_tokens": 2},
    ]
    assert [part.partition(":")[0] for part in parts[:4]] == ["event", "data", "event", "data"]


async def test_tokens_can_be_returned_as_ids(rig):
    rig.one.script = [
        generate.Output(
            (104,),
            generate.FinishReason.LENGTH,
            logprobs=(generate.TokenLogprobs(-0.5, (generate.TopLogprob(105, -0.25),)),),
        )
    ]
    by_number = {"return_tokens_as_token_ids": True}
    chat = (await rig.chat(logprobs=True, top_logprobs=1, **by_number)).json()
    completion = (await rig.complete(logprobs=1, **by_number)).json()

    told = chat["choices"][0]["logprobs"]["content"][0]
    assert (told["token"], bytes(told["bytes"])) == ("token_id:104", b"token_id:104")
    assert told["top_logprobs"][0]["token"] == "token_id:105"
    logprobs = completion["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:104"]
    assert logprobs["top_logprobs"] == [{"token_id:105": -0.25, "token_id:104": -0.5}]


async def test_fingerprint_depends_on_the_model_and_not_on_the_request(rig):
    other = await rig.worker("other", context_length=100)
    first, second = (await rig.chat()).json(), (await rig.complete()).json()
    third = (await rig.chat(model="other")).json()

    assert first["system_fingerprint"].startswith("fp_")
    assert first["system_fingerprint"] == second["system_fingerprint"]
    assert third["system_fingerprint"] != first["system_fingerprint"]
    assert other.requests


async def test_service_tier_is_reported_in_whole_answers_and_in_chunks_on_request(rig):
    assert (await rig.chat(service_tier="auto")).json()["service_tier"] == "default"
    assert (await rig.chat()).json()["service_tier"] == "default"
    assert all(
        c["service_tier"] == "default"
        for c in chunks(await rig.chat(service_tier="default", stream=True))
    )


async def test_error_of_the_worker_keeps_its_field_and_retry_time(rig):
    def busy(call, _):
        call.fail(errors.Overloaded("full", retry_after_s=7))

    def wrong(call, _):
        call.fail(errors.InvalidRequest("no", param="logit_bias"))

    rig.one.script = busy
    refused = await rig.chat()
    rig.one.script = wrong
    named = await rig.chat()

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
    assert (named.status_code, named.json()["error"]["param"]) == (400, "logit_bias")


async def ask(rig, headers, **fields):
    body = {"model": "m", "prompt": "x", **fields}
    return await rig.client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("name", nvext.INSTANCE)
async def test_header_overrides_the_worker_in_the_body(rig, name):
    other = await rig.worker()
    nvext = {"backend_instance_id": rig.one.instance.instance_id}
    for _ in range(3):
        await ask(rig, {name: str(other.instance.instance_id)}, nvext=nvext)

    assert (len(other.requests), len(rig.one.requests)) == (3, 0)


async def test_decode_worker_id_names_the_worker(rig):
    other = await rig.worker()
    for _ in range(3):
        await ask(rig, {}, nvext={"decode_worker_id": other.instance.instance_id})

    assert (len(other.requests), len(rig.one.requests)) == (3, 0)


async def test_rank_and_session_reach_the_worker(rig):
    nvext = {
        "agent_hints": {"priority": 3, "osl": 77},
        "session_control": {"session_id": "body", "action": "bind", "timeout": 9},
    }
    await ask(rig, {"x-dp-rank": "1", "x-dynamo-session-id": "header"}, nvext=nvext)
    await ask(rig, {}, nvext=nvext, priority=4)
    first, second = rig.one.requests

    assert (first.priority, first.expected_output_tokens) == (3, 77)
    assert (first.data_parallel_rank, first.session_id) == (1, "header")
    assert (second.priority, second.session_id) == (-4, "body")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-worker-instance-id", "abc"),
        ("x-dynamo-worker-instance-id", "-1"),
        ("x-dp-rank", "1.5"),
        ("x-dynamo-dp-rank", "9" * 30),
        ("x-dynamo-session-id", "s" * 201),
    ],
)
async def test_invalid_header_is_named(rig, name, value):
    answer = await ask(rig, {name: value})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_request_without_routing_headers_is_unchanged():
    request = generate.Request(id="r", model="m", token_ids=b"1234", session_id="s")
    prompts = [preprocessor.Prepared(request, None)]

    assert nvext.parse_headers({"host": "x"}).apply(prompts) is prompts


def test_instance_id_beyond_64_bits_is_refused():
    with pytest.raises(errors.InvalidRequest, match="from 0 to 9223372036854775807"):
        nvext.parse_headers({"x-worker-instance-id": str(2**63)})


async def test_session_stays_with_its_worker(bare):
    keeps = config.RoutingConfig(router_mode="kv", router_session_affinity_ttl_secs=60.0)
    await bare.start(keeps)
    workers = [await bare.worker() for _ in range(3)]

    for number in range(6):
        headers = {"x-dynamo-session-id": "s"}
        answer = await ask(bare, headers, prompt=f"{number} {'x' * 100}")
        assert answer.status_code == 200

    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 6]


async def test_usage_of_each_chunk_is_not_counted_over_all_choices(rig, monkeypatch):
    num_looks = 0
    count = detokenize.ChoiceText.num_tokens.fget

    def look(text):
        nonlocal num_looks
        num_looks += 1
        return count(text)

    monkeypatch.setattr(detokenize.ChoiceText, "num_tokens", property(look))
    prompts = [f"hi {number}" for number in range(100)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await rig.complete(prompts, stream=True, stream_options=options)
    found = chunks(answer)

    assert found[-1]["usage"]["completion_tokens"] == max(
        chunk["usage"]["completion_tokens"] for chunk in found
    )
    assert len(found) > 500
    assert num_looks < 40 * len(prompts)


async def test_explanations_are_told_once_whatever_the_number_of_choices(rig):
    asked = {"extra_fields": ["explanation"]}
    answer = await rig.complete(["a", "b", "c"], stream=True, nvext=asked)
    told = [chunk["nvext"]["explanation"] for chunk in chunks(answer) if "nvext" in chunk]

    assert len(told) == 3
    assert sum(map(len, told)) == 3
