"""The translation of requests, outputs (recorded from vLLM 0.32) and load of vLLM; without vLLM."""

from types import SimpleNamespace

import msgspec
import pytest

from dynamo.base import errors
from dynamo.engine import api
from dynamo.engine.adapters import translation as shared
from dynamo.engine.adapters.vllm import tier_plan, translation
from dynamo.engine.adapters.vllm.translation import VllmLoad
from dynamo.kvbm import tier_report
from dynamo.observability import tracing
from dynamo.protocols import blocks, generate, kv_transfer

PARAMS = {"do_remote_decode": True}


def fields(index=0, *, stop=None, options=None, report=None, **request):
    made = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1, 2, 3]),
        stop_conditions=generate.StopConditions(**stop or {}),
        sampling_options=generate.SamplingOptions(**options or {}),
        output_options=generate.OutputOptions(**report or {}),
        **request,
    )
    return translation.sampling_fields(made, index, shared.GuidedSupport())


def test_default_options_are_neutral():
    made = fields()

    assert made["temperature"] == made["top_p"] == made["repetition_penalty"] == 1.0
    assert made["top_k"] == made["min_p"] == made["presence_penalty"] == made["min_tokens"] == 0
    assert made["stop_token_ids"] == []
    for name in (
        "seed",
        "logit_bias",
        "allowed_token_ids",
        "max_tokens",
        "logprobs",
        "structured_outputs",
        "extra_args",
    ):
        assert made[name] is None


def test_every_sampling_option_is_passed_on():
    told = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0},
    }

    assert told.items() <= fields(options=told).items()
    assert fields(options={"allowed_token_ids": (5, 6)})["allowed_token_ids"] == [5, 6]


def test_top_p_of_zero_is_greedy():
    made = fields(options={"top_p": 0.0, "temperature": 0.7})

    assert (made["temperature"], made["top_p"]) == (0.0, 1.0)


def test_only_the_requests_own_end_tokens_end_an_answer():
    made = fields(stop={"stop_token_ids": (7,)}, eos_token_ids=(8, 9))

    assert made["ignore_eos"] is True
    assert made["stop_token_ids"] == [7, 8, 9]


def test_ignore_eos_drops_the_end_tokens():
    made = fields(stop={"stop_token_ids": (7,), "ignore_eos": True}, eos_token_ids=(8, 9))

    assert made["stop_token_ids"] == [7]


@pytest.mark.parametrize(
    ("param", "most", "too_many"),
    [
        (
            "logit_bias",
            {"options": {"logit_bias": dict.fromkeys(range(1024), -100.0)}},
            {"options": {"logit_bias": dict.fromkeys(range(1025), -100.0)}},
        ),
        (
            "stop_token_ids",
            {"stop": {"min_tokens": 1, "stop_token_ids": tuple(range(128))}, "eos_token_ids": (5,)},
            {"stop": {"min_tokens": 1, "stop_token_ids": tuple(range(128))}, "eos_token_ids": (900,)},
        ),
    ],
)  # fmt: skip
def test_more_than_vllms_sampler_has_room_for_is_refused_by_name(param, most, too_many):
    assert fields(**most)
    with pytest.raises(errors.InvalidRequest, match=f"{param}: vLLM takes at most") as refusal:
        fields(**too_many)

    assert refusal.value.param == param


def test_end_tokens_that_are_never_held_back_may_be_many():
    made = fields(stop={"stop_token_ids": tuple(range(128))}, eos_token_ids=(900,))

    assert len(made["stop_token_ids"]) == 129


def test_vllm_without_a_limit_of_logprobs_reports_all():
    assert translation.max_top_logprobs(-1, 32_000) == 32_000
    assert translation.max_top_logprobs(20, 32_000) == 20


def test_choices_and_resumed_answers_have_different_seeds():
    options = {"seed": 40}
    first, second = (fields(index, options=options)["seed"] for index in (0, 1))
    goes_on = fields(options=options, num_resumed=1)["seed"]

    assert (first, second) == (40, 41)
    assert fields(options=options, first_choice=1)["seed"] == second
    assert goes_on not in (first, second)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, -(2**63)])
def test_every_seed_is_mapped_to_vllms_range(seed):
    assert 0 <= fields(options={"seed": seed})["seed"] < 2**63


def test_prompt_logprobs_and_kv_transfer_are_the_first_choices():
    asked = {
        "report": {"prompt_logprobs": 1, "logprobs": 2},
        "kv_transfer_params": kv_transfer.PREFILL_ONLY,
    }
    first, second = (fields(index, **asked) for index in (0, 1))

    assert first["prompt_logprobs"] == 1
    assert first["extra_args"] == {"kv_transfer_params": PARAMS}
    assert second["prompt_logprobs"] is second["extra_args"] is None
    assert second["logprobs"] == 2


def test_a_thinking_limit_is_vllms_thinking_token_budget():
    limit = generate.ThinkingLimit(max_tokens=5, close_ids=(4,))

    assert fields(thinking=limit)["thinking_token_budget"] == 5


def test_a_resumed_guided_answer_is_refused_with_the_callers_parameter():
    guided = generate.GuidedDecoding(regex="a", param="guided_regex")
    with pytest.raises(errors.InvalidRequest, match="guided_regex") as refusal:
        fields(options={"guided_decoding": guided}, num_resumed=2)

    assert refusal.value.param == "guided_regex"


def result(tokens, *, reason=None, stop_reason=None, logprobs=None, prompt=None, **fields):
    said = SimpleNamespace(
        token_ids=tokens, finish_reason=reason, stop_reason=stop_reason, logprobs=logprobs
    )
    whole = {"num_cached_tokens": 32, "kv_transfer_params": None, "prompt_logprobs": prompt}
    return SimpleNamespace(outputs=[said], **whole | fields)


def logprob(value, rank):
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=None)


def whole(told, *, index=1, is_first=False, eos=(2,), **report):
    request = generate.Request(
        id="a",
        model="m",
        token_ids=blocks.pack([1]),
        eos_token_ids=eos,
        output_options=generate.OutputOptions(**report),
    )
    return translation.translate_output(told, index, request, is_first=is_first)


@pytest.fixture
def record():
    """The record of a call whose spans are exported, which is being handled."""
    made = tracing.StageRecord()
    token = tracing.stage_record.set(made)
    yield made
    tracing.stage_record.reset(token)


def test_connector_reports_the_reads_of_the_first_choice_of_a_traced_call(record):
    assert fields()["extra_args"] == {tier_plan.IS_TRACED: True}
    assert fields(1)["extra_args"] is None


def test_reads_from_tiers_are_stages_of_a_traced_call(record):
    read = tier_report.TierRead(
        tier="disk", to="host", num_blocks=3, num_bytes=300, began_at=1.0, ended_at=2.0
    )
    params = {"kv_tier_tokens": {"disk": 96}, "kv_tier_reads": msgspec.to_builtins([read])}
    output = whole(result([5], reason="length", kv_transfer_params=params), index=0)

    assert output.kv_transfer_params is None
    assert output.tier_tokens == (("disk", 96),)
    assert record.attributes == {"cached_tokens.disk": 96}
    assert record.stages == [
        tracing.Stage(
            "read_tier", 1.0, 2.0,
            {"tier": "disk", "to": "host", "blocks": 3, "bytes": 300},
        )
    ]  # fmt: skip


def test_a_plain_output_has_tokens_and_index():
    assert whole(result([5, 6])) == generate.Output((5, 6), None, 1)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        (None, None, (None, None)),
        ("length", None, ("length", None)),
        ("stop", 2, ("eos", None)),
        ("stop", 9, ("stop", 9)),
        ("repetition", "repetition_detected", ("stop", "repetition_detected")),
    ],
)
def test_each_finish_reason_is_translated(reason, stop_reason, told):
    made = whole(result([5], reason=reason, stop_reason=stop_reason))

    assert (made.finish_reason, made.stop_reason) == told


def test_cached_tokens_are_reported_with_the_first_output():
    assert whole(result([5]), is_first=True).cached_tokens == 32
    assert whole(result([5]), is_first=False).cached_tokens is None
    assert whole(result([5], num_cached_tokens=None), is_first=True).cached_tokens == 0


def test_the_chosen_token_precedes_the_likeliest():
    step = {7: logprob(-3.0, 9), 5: logprob(-0.1, 1), 6: logprob(-0.2, 2)}
    (made,) = whole(result([7], logprobs=[step]), logprobs=2).logprobs

    assert made.logprob == -3.0
    assert made.top == (generate.TopLogprob(5, -0.1), generate.TopLogprob(6, -0.2))


def test_a_chosen_token_may_be_among_the_likeliest():
    step = {5: logprob(-0.1, 1), 6: logprob(-0.2, 2)}
    (made,) = whole(result([5], logprobs=[step]), logprobs=1).logprobs

    assert made.top == (generate.TopLogprob(5, -0.1),)


def test_the_first_prompt_token_has_no_logprob():
    told = result([5], prompt=[None, {5: logprob(-1.0, 1)}, {6: logprob(-2.0, 1)}])
    made = whole(told, prompt_logprobs=0)

    assert made.prompt_logprobs == (generate.TokenLogprobs(-1.0), generate.TokenLogprobs(-2.0))


def test_kv_transfer_params_are_passed_on_unchanged():
    params = {"remote_block_ids": [[1]], "remote_host": "h"}

    assert whole(
        result([5], kv_transfer_params=params), is_first=True
    ).kv_transfer_params == kv_transfer.KvTransferParams(connector=params)


def test_answer_that_vllm_aborted_is_no_complete_one():
    with pytest.raises(errors.EngineFailed, match="vLLM gave the request up: abort"):
        whole(result([5], reason="abort"))


def test_an_unknown_finish_reason_raises_engine_failed():
    with pytest.raises(errors.EngineFailed):
        whole(result([], reason="error"))


FACTS = api.EngineFacts(
    context_length=512,
    kv_block_size=32,
    total_kv_blocks=40,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def stats(running=0, waiting=0, skipped=0, usage=0.0, queries=0, hits=0):
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def now(load, *, prefill=0, is_idle=False):
    return load.metrics(FACTS, num_prefill_tokens=prefill, is_idle=is_idle)


def test_load_is_of_the_last_step_and_hits_add_up():
    load = VllmLoad(1)
    load.record(0, stats(running=5, queries=100))
    load.record(0, stats(running=2, waiting=3, skipped=1, usage=0.25, queries=100, hits=50))
    (one,) = now(load, prefill=7)

    assert one.worker_stats.request_active_slots == 2
    assert one.worker_stats.num_requests_waiting == 4
    assert one.worker_stats.active_prefill_tokens == 7
    assert one.kv_stats.kv_active_blocks == 10
    assert one.kv_stats.gpu_prefix_cache_hit_rate == 0.25


def test_each_rank_has_its_own_load():
    load = VllmLoad(2)
    load.record(1, stats(running=3))
    zero, one = now(load, prefill=10)

    assert (zero.worker_stats.request_active_slots, one.worker_stats.request_active_slots) == (0, 3)
    assert [state.worker_stats.data_parallel_rank for state in (zero, one)] == [0, 1]
    assert zero.worker_stats.active_prefill_tokens == 5


def test_an_idle_engine_reports_no_load():
    load = VllmLoad(1)
    load.record(0, stats(running=1, waiting=1, usage=0.5))
    (one,) = now(load, is_idle=True)

    assert one.worker_stats.request_active_slots == one.worker_stats.num_requests_waiting == 0
    assert one.kv_stats.kv_active_blocks == 0


def iteration(at, *, prompt=0, generated=0, first_tokens=0):
    return SimpleNamespace(
        iteration_timestamp=at,
        num_prompt_tokens=prompt,
        num_generation_tokens=generated,
        time_to_first_tokens_iter=[0.1] * first_tokens,
    )


def test_pass_lasted_since_the_one_before():
    load, passes = VllmLoad(1), []
    for at, running, fields in (
        (5.0, 1, {"prompt": 30, "generated": 1, "first_tokens": 1}),  # nothing ran before it
        (5.25, 2, {"generated": 1}),
        (5.75, 2, {"prompt": 20, "generated": 2, "first_tokens": 1}),
        (6.0, 0, {"prompt": 65, "generated": 3, "first_tokens": 1}),  # a prompt of several passes
    ):
        load.record(0, stats(running=running, usage=0.25), iteration(at, **fields))
        told = now(load)[0].last_passes
        passes.append([(p.num_prompt_tokens, p.num_kv_tokens, p.wall_s) for p in told])

    continued = (0, 320, 0.25)
    assert passes == [[], [continued], [continued, (20, 320, 0.5)], [continued]]
