"""The frontend's metrics, under the original's names."""

import pytest
from frontend_rig import outputs

from dynamo.base import errors
from dynamo.frontend import metrics
from dynamo.observability import metrics as observed
from dynamo.preprocess import images
from dynamo.protocols import generate, model_errors

P = "dynamo_frontend_"


async def test_streamed_request_is_counted(rig):
    rig.one.script = [generate.Output((104,), cached_tokens=4), *outputs("ello")]
    await rig.chat(stream=True)
    counted = await rig.metrics()
    labels = (
        'endpoint="chat_completions",error_type="",model="m",request_type="stream",status="success"'
    )

    assert counted[P + f"requests_total{{{labels}}}"] == 1
    assert counted[P + 'output_tokens_total{model="m"}'] == 5
    assert counted[P + 'input_sequence_tokens_sum{model="m"}'] == 9
    assert counted[P + 'output_sequence_tokens_sum{model="m"}'] == 5
    assert counted[P + 'cached_tokens_sum{model="m"}'] == 4
    assert counted[P + 'time_to_first_token_seconds_count{model="m"}'] == 1
    assert counted[P + 'inter_token_latency_seconds_count{model="m"}'] == 4
    assert counted[P + 'request_duration_seconds_count{model="m"}'] == 1


async def test_prompts_beside_the_first_of_a_request_are_counted(rig):
    await rig.chat()
    answer = await rig.complete(["a", "b", "c"])
    counted = await rig.metrics()

    assert answer.status_code == 200
    assert counted[P + 'further_prompts_total{model="m"}'] == 2
    assert counted[P + 'output_sequence_tokens_count{model="m"}'] == 2


async def test_times_of_prompts_and_of_the_request_plane_are_observed(rig):
    await rig.chat()
    counted = await rig.metrics()

    for name in ("template_seconds", "tokenize_seconds"):
        assert counted[P + f"{name}_count"] == 1
    assert counted[P + 'tokenizer_latency_ms_count{operation="tokenize"}'] == 1
    assert counted["dynamo_request_plane_inflight_requests"] == 0
    assert counted["dynamo_request_plane_queue_seconds_count"] == 1
    assert counted["dynamo_request_plane_roundtrip_ttft_seconds_count"] == 1


async def test_latest_request_of_a_worker_is_shown(rig):
    await rig.chat(stream=True)
    await rig.chat(messages=[{"role": "user", "content": "much longer"}])
    counted = await rig.metrics()
    shown = {
        name.removeprefix(P + "worker_last_").partition("{")[0]: value
        for name, value in counted.items()
        if "worker_last" in name
    }

    assert sorted(shown) == [
        "input_sequence_tokens", "inter_token_latency_seconds", "time_to_first_token_seconds",
    ]  # fmt: skip
    assert shown["input_sequence_tokens"] == len("user: much longer\n")


def test_workers_heard_longest_ago_are_shown_no_more():
    registry = observed.Registry("t")
    families = metrics.FrontendMetrics(registry, lambda: 1.0)
    for instance_id in range(metrics.MAX_WORKERS + 5):
        meter = metrics.RequestMeter(families.for_model("m"), "completions", is_stream=True)
        meter.record_prompt(generate.Request(id="r", model="m", token_ids=b"0123"))
        meter.worker_id = instance_id
        meter.record_tokens(Choice(), 1)
        meter.record_success()
    text = registry.render().decode()

    assert text.count("t_worker_last_input_sequence_tokens{") == metrics.MAX_WORKERS
    assert 'worker_id="4"' not in text
    assert 'worker_id="5"' in text


def test_request_without_a_worker_is_counted_as_rejected():
    families = metrics.FrontendMetrics(observed.Registry("t"), lambda: 1.0)
    meter = metrics.RequestMeter(families.for_model("m"), "completions", is_stream=True)
    meter.record_failure(errors.Overloaded("full"))

    assert families.rejections.labels("completions", "m")._value.get() == 1


def test_length_of_cached_prompts_has_the_label_and_buckets_of_dynamo():
    registry = observed.Registry("dynamo_frontend")
    metrics.FrontendMetrics(registry, lambda: 1.0).for_model("M")
    (family,) = (
        family
        for family in registry.collectors.collect()
        if family.name == "dynamo_frontend_cached_tokens"
    )
    buckets = [sample.labels for sample in family.samples if sample.name.endswith("_bucket")]
    bounds = "0 100 210 430 870 1800 3600 7400 15000 31000 63000 130000 inf"

    assert [float(labels["le"]) for labels in buckets] == [float(x) for x in bounds.split()]
    assert {labels["model"] for labels in buckets} == {"m"}


@pytest.mark.parametrize("gauge", ["inflight_requests", "queued_requests", "active_requests"])
async def test_gauges_return_to_zero(rig, gauge):
    await rig.chat()
    await rig.chat(n=0)
    await rig.chat(stream=True)
    counted = await rig.metrics()

    assert counted[P + gauge + '{model="m"}'] == 0


async def test_request_that_dies_by_a_fault_is_not_open_any_more(rig, monkeypatch):
    def fail(self, messages):
        raise ZeroDivisionError

    monkeypatch.setattr(images.ImageInput, "read", fail)
    answer = await rig.chat()
    counted = await rig.metrics()

    assert answer.status_code == 500
    assert counted[P + 'inflight_requests{model="m"}'] == 0
    assert not rig.frontend._metrics.open_requests


async def test_unknown_model_name_makes_no_label(rig):
    await rig.chat(model="made-up")
    text = (await rig.client.get("/metrics")).text

    assert "made-up" not in text
    assert 'error_type="not_found",model="unknown"' in text


async def test_the_prefix_can_be_chosen(bare):
    await bare.start(metrics_prefix="mine")
    text = (await bare.client.get("/metrics")).text

    assert "mine_disconnected_clients 0.0" in text


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (errors.InvalidRequest("x"), "validation"),
        (model_errors.ModelNotFound("x"), "not_found"),
        (errors.NoWorkers("x"), "overload"),
        (errors.RateLimited("x"), "rate_limit"),
        (errors.EngineFailed("x"), "internal"),
        (errors.Cancelled("x"), "cancelled"),
    ],
)
def test_each_error_has_its_label(error, label):
    registry = observed.Registry("t")
    families = metrics.FrontendMetrics(registry, lambda: 1.0)
    meter = metrics.RequestMeter(families.for_model("M"), "completions", is_stream=False)
    meter.record_failure(error)
    meter.record_success()

    assert (
        f't_requests_total{{endpoint="completions",error_type="{label}",model="m",request_type="unary",'
        'status="error"} 1.0'
    ) in registry.render().decode()


class Choice:
    last_at = None


def test_output_of_several_tokens_counts_each_of_them():
    registry = observed.Registry("t")
    now = iter([0.0, 1.0, 3.0])
    families = metrics.FrontendMetrics(registry, lambda: next(now))
    meter = metrics.RequestMeter(families.for_model("m"), "completions", is_stream=True)
    choice = Choice()
    meter.record_tokens(choice, 1)
    meter.record_tokens(choice, 4)
    itl = families.for_model("m").itl

    assert (itl.count, itl.sum) == (4, 2.0)
    assert families.for_model("m").ttft.sum == 1.0


async def test_tokenizer_cache_use_is_counted(bare):
    await bare.start()
    await bare.worker(context_length=4096)
    long = "a story about a cat " * 40
    first = await bare.chat(long)
    counted = await bare.metrics()
    await bare.chat(long)
    again = await bare.metrics()
    num_tokens = first.json()["usage"]["prompt_tokens"]

    known, new, hits, misses = (
        P + "tokenizer_cache_" + name
        for name in (
            'cached_tokens_total{model="m"}',
            'uncached_tokens_total{model="m"}',
            "hits_total",
            "misses_total",
        )
    )
    assert (counted[known], counted[new]) == (0, num_tokens)
    assert (again[known], again[new]) == (num_tokens, num_tokens)
    assert again[hits] == again[misses] == counted[misses]


async def test_stages_are_observed_once_per_request(rig):
    await rig.chat(stream=True)
    counted = await rig.metrics()

    for stage in ("preprocess", "route", "transport_roundtrip"):
        assert counted[P + f'stage_duration_seconds_count{{stage="{stage}"}}'] == 1


async def test_failures_are_counted_by_class_and_code(rig):
    await rig.chat(model="made-up")
    await rig.chat(n=0)
    counted = await rig.metrics()

    assert counted[P + 'failures_total{class="ModelNotFound",reason="model_not_found"}'] == 1
    assert sum(value for name, value in counted.items() if "failures_total" in name) == 2


class Observer:
    def __init__(self):
        self.seen = []

    def ended(self, request):
        self.seen.append(request)


def test_observer_is_called_once_with_all_times():
    now = iter([1.0, 2.0, 3.0, 5.0, 8.0])
    observer = Observer()
    families = metrics.FrontendMetrics(observed.Registry("t"), lambda: next(now), [observer])
    meter = metrics.RequestMeter(families.for_model("m"), "completions", is_stream=True)
    meter.record_prompt(generate.Request(id="r", model="m", token_ids=b"0123"))
    meter.record_dispatched()
    meter.record_tokens(Choice(), 1)
    meter.record_success()
    meter.record_disconnect()

    assert observer.seen == [meter]
    assert (meter.arrived_at, meter.prepared_at, meter.opened_at) == (1.0, 2.0, 3.0)
    assert (meter.first_token_at, meter.ended_at, meter.num_tokens) == (5.0, 8.0, 1)
    assert families.stages.roundtrip.sum == 3.0


def test_tokens_are_counted_while_the_answer_is_streamed():
    registry = observed.Registry("t")
    families = metrics.FrontendMetrics(registry, lambda: 0.0)
    meter = metrics.RequestMeter(families.for_model("m"), "completions", is_stream=True)

    meter.record_tokens(Choice(), 3)
    assert 'output_tokens_total{model="m"} 3.0' in registry.render().decode()
    meter.record_success()
    assert 'output_tokens_total{model="m"} 3.0' in registry.render().decode()
