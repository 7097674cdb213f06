import dataclasses
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.engine import api, refusal
from dynamo.protocols import blocks, generate, model_errors

FACTS = api.EngineFacts(
    context_length=100,
    kv_block_size=16,
    total_kv_blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)


def check(prompt=(1, 2), *, sampling=None, vocab_size=50, **fields):
    options = generate.SamplingOptions(**(sampling or {}))
    request = generate.Request(
        id="a", model="m", token_ids=blocks.pack(prompt), sampling_options=options, **fields
    )
    refusal.check(request, FACTS, vocab_size=vocab_size)


def refused(**arguments):
    with pytest.raises(errors.InvalidRequest) as caught:
        check(**arguments)
    return caught.value.param


def test_an_ordinary_request_passes():
    check(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logit_bias": {3: -100.0}})


def test_top_p_of_zero_is_accepted():
    check(sampling={"top_p": 0.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -(2**64)),
        ("n", 1025),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", (1, 50)),
    ],
)
def test_a_sampling_option_out_of_range_is_refused_by_name(name, value):
    assert refused(sampling={name: value}) == name


def test_a_prompt_token_outside_the_vocabulary_is_refused():
    assert refused(prompt=[1, 50]) == "prompt"
    check(prompt=[1, 50], vocab_size=None)


def test_a_stop_token_outside_the_vocabulary_is_refused():
    stops = generate.StopConditions(stop_token_ids=(-1,))

    assert refused(stop_conditions=stops) == "stop_token_ids"


def test_a_prompt_of_incomplete_tokens_is_refused():
    request = generate.Request(id="a", model="m", token_ids=b"12345")
    with pytest.raises(errors.InvalidRequest, match="got 5 bytes"):
        refusal.check(request, FACTS, vocab_size=50)


def test_an_unknown_lora_adapter_raises_worker_lost():
    with pytest.raises(errors.WorkerLost, match="adapters none; 'poet' was asked for"):
        check(lora_name="poet")


def test_an_unknown_data_parallel_rank_is_refused():
    assert refused(data_parallel_rank=1) == "data_parallel_rank"
    check(data_parallel_rank=0)


@given(st.integers(1, 200))
def test_a_prompt_must_leave_room_for_an_answer(prompt_len):
    if prompt_len < 100:
        check(prompt=[1] * prompt_len)
        return
    with pytest.raises(model_errors.ContextTooLong, match=f"{prompt_len} tokens; at most 99"):
        check(prompt=[1] * prompt_len)


def test_guided_decoding_needs_support_and_an_end_token():
    guided = generate.GuidedDecoding(regex="a", param="guided_regex")
    able = dataclasses.replace(FACTS, supports_guided=True)
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack((1, 2)),
        sampling_options=generate.SamplingOptions(guided_decoding=guided),
    )

    assert refused(sampling={"guided_decoding": guided}) == "guided_regex"
    with pytest.raises(errors.InvalidRequest, match="eos_token_ids"):
        refusal.check(request, able, vocab_size=50)
    refusal.check(msgspec.structs.replace(request, eos_token_ids=(2,)), able, vocab_size=50)


def test_a_resumed_request_has_a_prompt():
    check(prompt=(1, 2), num_resumed=1, first_choice=7)

    assert refused(prompt=(1, 2), num_resumed=2) == "num_resumed"
    assert refused(num_resumed=-1) == "num_resumed"
    assert refused(first_choice=2**32) == "first_choice"


def test_images_beyond_those_of_the_engine_are_refused():
    assert refused(images=(b"",)) == "images"
    refusal.check(
        generate.Request(id="a", model="m", token_ids=blocks.pack((1, 2)), images=(b"",)),
        dataclasses.replace(FACTS, max_images=1),
        vocab_size=50,
    )


def test_request_whose_id_is_open_is_refused():
    request = generate.Request(id="a", model="m", token_ids=blocks.pack((1, 2)))

    with pytest.raises(errors.InvalidRequest, match="'a' runs already"):
        refusal.check(request, FACTS, vocab_size=50, is_id_open=True)
