"""The request trace: rows from which the same load can be played again."""

import json

import pytest
from frontend_rig import outputs

from dynamo.protocols import blocks, generate


@pytest.fixture
async def traced(bare, tmp_path):
    bare.path = tmp_path / "trace"
    await bare.start(
        request_trace=True,
        request_trace_sinks=("jsonl",),
        request_trace_output_path=str(bare.path),
    )
    bare.one = await bare.worker(kv_cache_block_size=4)
    return bare


async def rows(rig):
    await rig.frontend._records.close()
    return [json.loads(line) for line in rig.path.with_suffix(".jsonl").read_text().splitlines()]


async def test_a_row_tells_lengths_times_and_blocks(traced):
    traced.one.script = [generate.Output((104,), cached_tokens=4), *outputs("ello")]
    await traced.client.post(
        "/v1/completions",
        json={"model": "m", "prompt": "ten tokens"},
        headers={"x-request-id": "mine"},
    )
    (row,) = await rows(traced)
    told = row["request"]
    local = blocks.local_hashes(blocks.pack(list(b"ten tokens")), 4)

    assert (row["schema"], row["event_type"]) == ("dynamo.request.trace.v1", "request_end")
    assert (told["request_id"], told["model"]) == ("mine", "m")
    assert (told["input_tokens"], told["cached_tokens"], told["output_tokens"]) == (10, 4, 5)
    assert told["replay"] == {
        "trace_block_size": 4,
        "input_length": 10,
        "input_sequence_hashes": blocks.sequence_hashes(local),
    }
    assert 0 <= told["ttft_ms"] <= told["total_time_ms"]
    assert told["request_received_ms"] <= row["event_time_unix_ms"]


async def test_what_cannot_be_played_again_is_not_told(traced):
    await traced.complete(["one", "two"])
    await traced.chat(model="made-up")
    traced.one.script = [*outputs("a"), *outputs("b", index=1)]
    await traced.chat(n=2)

    assert await rows(traced) == []


async def test_an_adapter_s_blocks_have_names_of_their_own(traced):
    await traced.worker(kv_cache_block_size=4, lora_names=("poet",))
    for model in ("m", "poet"):
        await traced.complete("ten tokens", model=model)
    plain, poet = [row["request"] for row in await rows(traced)]

    assert (plain["model"], poet["model"]) == ("m", "poet")
    assert len(poet["replay"]["input_sequence_hashes"]) == 2
    assert poet["replay"] != plain["replay"]
