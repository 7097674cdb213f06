"""Records of requests: the request trace, lines of the log, and spans."""

import json
import logging

import httpx
import pytest
from frontend_rig import outputs

import collector
from dynamo.frontend import config, metrics, request_records
from dynamo.observability import logs
from dynamo.protocols import blocks, generate, trace_context
from dynamo.router import route
from dynamo.simulate import recorded


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


def test_frontend_without_a_trace_needs_no_temporary_directory(monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)

    config.FrontendConfig().check()


async def rows(rig):
    await rig.frontend._records.close()
    return [json.loads(line) for line in rig.path.with_suffix(".jsonl").read_text().splitlines()]


async def test_trace_row_has_lengths_times_and_blocks(traced):
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


async def test_trace_of_a_frontend_can_be_replayed(traced):
    traced.one.script = [generate.Output((104,), cached_tokens=4), *outputs("ello")]
    for prompt in ("ten tokens", "ten token!"):
        await traced.complete(prompt)
    await rows(traced)
    traffic = recorded.read_traffic([traced.path.with_suffix(".jsonl")])
    first, second = traffic.trace.arrivals

    assert (first.num_tokens, first.num_output, traffic.trace.block_size) == (10, 5, 4)
    assert first.names[:2] == second.names[:2]
    assert [request.cached_tokens for request in traffic.requests] == [4, 4]


async def test_trace_row_says_how_many_tokens_came_from_which_tier(traced):
    first = generate.Output((104,), cached_tokens=8, tier_tokens=(("disk", 4), ("host", 2)))
    traced.one.script = [first, *outputs("ello")]
    await traced.complete("ten tokens")
    (row,) = await rows(traced)

    assert row["request"]["cached_tokens_by_tier"] == {"disk": 4, "host": 2}


async def test_request_that_cannot_be_replayed_has_no_trace_row(traced):
    await traced.complete(["one", "two"])
    await traced.chat(model="made-up")
    traced.one.script = [*outputs("a"), *outputs("b", index=1)]
    await traced.chat(n=2)

    assert await rows(traced) == []


async def test_blocks_of_an_adapter_have_their_own_hashes(traced):
    await traced.worker(kv_cache_block_size=4, lora_names=("poet",))
    for model in ("m", "poet"):
        await traced.complete("ten tokens", model=model)
    plain, poet = [row["request"] for row in await rows(traced)]

    assert (plain["model"], poet["model"]) == ("m", "poet")
    assert len(poet["replay"]["input_sequence_hashes"]) == 2
    assert poet["replay"] != plain["replay"]


NAME = "dynamo.frontend.request_records"  # as the guide has it, for DYN_LOG


async def test_request_writes_one_log_line_at_debug(bare, caplog):
    caplog.set_level(logging.DEBUG, NAME)
    seen = []
    caplog.handler.addFilter(lambda record: seen.append(logs.log_context.get()) or True)
    await bare.start()
    await bare.worker()
    answer = await bare.chat()
    line = next(record.getMessage() for record in caplog.records if record.name == NAME)

    assert line.startswith("chat_completions of m: success, 5 tokens in ")
    assert answer.headers["x-request-id"] in {s.request_id for s in seen if s is not None}


def test_requests_are_not_logged_by_default():
    assert not request_records.is_log_enabled()


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MINE = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "v=1"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def found():
    with collector.running() as running:
        yield running


@pytest.fixture
async def exporting(bare, found):
    await bare.start(otel_export_enabled=True, otel_exporter_otlp_traces_endpoint=found.endpoint)
    bare.one = await bare.worker()
    return bare


async def ask(rig, **headers) -> httpx.Response:
    return await rig.client.post("/v1/chat/completions", json=BODY, headers=headers)


async def exported_spans(rig, found):
    """The spans, once the frontend has closed its exporter."""
    await rig.frontend._records.close()
    return {span.name: span for span in found.spans}


async def test_request_is_a_span_with_its_stages_as_children(exporting, found):
    exporting.one.script = outputs("hello")
    await ask(exporting, **MINE, **{"x-request-id": "mine"})
    spans = await exported_spans(exporting, found)
    root = spans.pop("http-request")

    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert spans.keys() == {"preprocess", "prefill_routing", "transport_roundtrip", "stream"}
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    assert collector.attributes(root) == {
        "x_request_id": "mine",
        "endpoint": "chat_completions",
        "model": "m",
        "request_type": "stream",
        "input_tokens": 9,
        "cached_tokens": 0,
        "output_tokens": 5,
        "num_migrations": 0,
        "worker_id": f"{exporting.one.instance.instance_id:x}",
    }


async def test_span_names_another_worker_that_computed_the_prompt(exporting, found, monkeypatch):
    record_dispatched = metrics.RequestMeter.record_dispatched

    def record_prefill_first(meter):
        meter.record_prefill(route.PrefillResult(10, 0.0))
        record_dispatched(meter)

    monkeypatch.setattr(metrics.RequestMeter, "record_dispatched", record_prefill_first)
    await ask(exporting, **MINE)
    root = (await exported_spans(exporting, found))["http-request"]

    assert collector.attributes(root)["prefill_worker_id"] == "a"


async def test_span_has_the_tokens_of_all_prompts(exporting, found):
    await exporting.client.post("/v1/completions", json={"model": "m", "prompt": ["ab", "cde"]})
    root = (await exported_spans(exporting, found))["http-request"]

    assert collector.attributes(root)["input_tokens"] == 5


async def test_worker_receives_the_requests_span(exporting, found):
    await ask(exporting, **MINE)
    asked = trace_context.read(exporting.one.calls[0].headers)
    root = (await exported_spans(exporting, found))["http-request"]

    assert (asked.trace_id, asked.span_id) == (TRACE, root.span_id.hex())
    assert (asked.is_sampled, asked.state) == (True, "v=1")


async def test_span_of_a_failed_request_has_its_error(exporting, found):
    answer = await exporting.chat(model="made-up")
    root = (await exported_spans(exporting, found))["http-request"]

    assert answer.status_code == 404
    assert (root.status.code, root.status.message) == (2, "not_found")
    assert found.names == {"http-request"}


async def test_unsampled_trace_is_forwarded_and_not_exported(exporting, found):
    await ask(exporting, traceparent=f"00-{TRACE}-{SPAN}-00")
    await exported_spans(exporting, found)

    assert exporting.one.calls[0].headers["traceparent"].startswith(f"00-{TRACE}-")
    assert found.spans == []


async def test_trace_reaches_the_worker_unchanged_without_an_exporter(rig):
    await ask(rig, **MINE)
    await ask(rig)

    assert rig.one.calls[0].headers.items() >= MINE.items()
    assert "traceparent" not in rig.one.calls[1].headers
