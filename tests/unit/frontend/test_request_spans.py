"""The spans of a request in the frontend, as a collector gets them."""

import httpx
import pytest
from frontend_rig import outputs

import collector
from dynamo.protocols import trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MINE = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "v=1"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def found():
    with collector.running() as running:
        yield running


@pytest.fixture
async def traced(bare, found):
    await bare.start(otel_export_enabled=True, otel_exporter_otlp_traces_endpoint=found.endpoint)
    bare.one = await bare.worker()
    return bare


async def ask(rig, **headers) -> httpx.Response:
    return await rig.client.post("/v1/chat/completions", json=BODY, headers=headers)


async def told(rig, found):
    """The spans, once the frontend has closed its exporter."""
    await rig.frontend._records.close()
    return {span.name: span for span in found.spans}


async def test_a_request_is_a_span_and_its_stages_are_its_children(traced, found):
    traced.one.script = outputs("hello")
    await ask(traced, **MINE, **{"x-request-id": "mine"})
    spans = await told(traced, found)
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
    }


async def test_the_worker_is_asked_by_that_span(traced, found):
    await ask(traced, **MINE)
    asked = trace_context.read(traced.one.calls[0].headers)
    root = (await told(traced, found))["http-request"]

    assert (asked.trace_id, asked.span_id) == (TRACE, root.span_id.hex())
    assert (asked.is_sampled, asked.state) == (True, "v=1")


async def test_what_fails_says_so(traced, found):
    answer = await traced.chat(model="made-up")
    root = (await told(traced, found))["http-request"]

    assert answer.status_code == 404
    assert (root.status.code, root.status.message) == (2, "not_found")
    assert found.names == {"http-request"}


async def test_what_is_not_sampled_is_not_told_but_goes_on(traced, found):
    await ask(traced, traceparent=f"00-{TRACE}-{SPAN}-00")
    await told(traced, found)

    assert traced.one.calls[0].headers["traceparent"].startswith(f"00-{TRACE}-")
    assert found.spans == []


async def test_without_an_exporter_the_callers_trace_reaches_the_worker_as_it_is(rig):
    await ask(rig, **MINE)
    await ask(rig)

    assert rig.one.calls[0].headers.items() >= MINE.items()
    assert "traceparent" not in rig.one.calls[1].headers
