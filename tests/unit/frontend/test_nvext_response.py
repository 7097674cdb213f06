"""The nvext object of responses: worker, times and usage."""

import json

from frontend_rig import events

from dynamo.base import errors
from dynamo.frontend import nvext_response
from dynamo.protocols import generate
from dynamo.testing import clock as clocks


def chunks(answer):
    return [event for event in events(answer.text) if event != "[DONE]"]


async def test_times_are_in_milliseconds_from_arrival():
    clock = clocks.VirtualClock()
    one = nvext_response.NvextResponse(["timing"], clock)
    counted = []
    count = one.wrap_counter(lambda choice, num: counted.append((choice, num)))
    for num_tokens, pause_s in ((1, 0.5), (2, 0.2), (2, 0.2)):
        await clock.advance(pause_s)
        count("c", num_tokens)
    await clock.advance(0.1)
    timing = one.build_fields(is_last=True, cached_share=0.25)["nvext"]["timing"]

    assert counted == [("c", 1), ("c", 2), ("c", 2)]
    assert round(timing["ttft_ms"]) == 500
    assert round(timing["itl_ms"]) == 100
    assert round(timing["total_time_ms"]) == 1000
    assert timing["kv_hit_rate"] == 0.25
    assert one.build_fields(is_last=False) == {}


def test_answer_of_one_token_has_no_inter_token_time():
    one = nvext_response.NvextResponse(["timing"], clocks.VirtualClock())
    one.wrap_counter(lambda *_: None)("c", 1)

    assert one.build_fields(is_last=True)["nvext"]["timing"]["itl_ms"] is None


async def test_whole_answer_has_its_worker_and_times(rig):
    answer = await rig.chat(nvext={"extra_fields": ["worker_id", "timing"]})
    told = answer.json()["nvext"]
    worker = rig.one.instance.instance_id

    assert told["worker_id"] == {"prefill_worker_id": worker, "decode_worker_id": worker}
    assert told["timing"].keys() == {
        "request_received_ms", "ttft_ms", "itl_ms", "total_time_ms", "kv_hit_rate",
    }  # fmt: skip
    assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] > 0


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
    assert logprobs["top_logprobs"] == [{"token_id:105": -0.25}]


async def test_fingerprint_depends_on_the_model_and_not_on_the_request(rig):
    other = await rig.worker("other", context_length=100)
    first, second = (await rig.chat()).json(), (await rig.complete()).json()
    third = (await rig.chat(model="other")).json()

    assert first["system_fingerprint"].startswith("fp_")
    assert first["system_fingerprint"] == second["system_fingerprint"]
    assert third["system_fingerprint"] != first["system_fingerprint"]
    assert other.requests


async def test_requested_service_tier_is_reported(rig):
    assert (await rig.chat(service_tier="auto")).json()["service_tier"] == "default"
    assert all(
        c["service_tier"] == "default"
        for c in chunks(await rig.chat(service_tier="default", stream=True))
    )
    assert "service_tier" not in (await rig.chat()).json()


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
