"""Which requests are sampled, and how their spans reach a collector."""

import sys

import pytest

import collector
from dynamo.base import errors
from dynamo.observability import otlp, tracing
from dynamo.protocols import trace_context

CONTEXT = trace_context.TraceContext("a" * 32, "b" * 16, 1, "v=1")


def settings(**fields):
    return tracing.TracingConfig(otel_export_enabled=True, **fields)


def test_export_is_off_by_default():
    assert tracing.make_exporter(tracing.TracingConfig()) is None


def test_endpoint_that_is_no_url_is_a_config_error():
    with pytest.raises(errors.ConfigError, match=r"OTLP over HTTP.*got 'localhost:4317'"):
        tracing.make_exporter(settings(otel_exporter_otlp_traces_endpoint="localhost:4317"))


@pytest.mark.parametrize(
    "fields",
    [{}, {"otel_exporter_otlp_traces_endpoint": "http://tempo:4317"}],
    ids=["of all signals", "of spans"],
)
def test_port_of_grpc_is_warned_about(fields, monkeypatch, caplog):
    if not fields:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://tempo:4317")
    tracing.make_exporter(settings(**fields)).close()

    assert "http://tempo:4317 is usually the port of OTLP over gRPC" in caplog.text


def test_missing_opentelemetry_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "dynamo.observability.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=otel"):
        tracing.make_exporter(settings())


def test_collector_receives_each_field_of_a_span():
    root = tracing.Span(
        name="http-request",
        context=CONTEXT,
        parent_id="c" * 16,
        started_at=1700000000.0,
        ended_at=1700000001.5,
        kind="server",
        attributes={"model": "m", "output_tokens": 7},
        error="overload",
    )
    with collector.running() as receiver:
        exporter = tracing.make_exporter(
            settings(otel_exporter_otlp_traces_endpoint=receiver.endpoint, otel_service_name="mine")
        )
        exporter.export([root])
        exporter.close()
        (span,) = receiver.spans

    assert receiver.services == {"mine"}
    assert (span.trace_id.hex(), span.span_id.hex()) == (CONTEXT.trace_id, CONTEXT.span_id)
    assert span.parent_span_id.hex() == "c" * 16
    assert (span.end_time_unix_nano - span.start_time_unix_nano) == 1_500_000_000
    assert collector.attributes(span) == {"model": "m", "output_tokens": 7}
    assert (span.kind, span.trace_state) == (2, "v=1")
    assert (span.status.code, span.status.message) == (2, "overload")


def test_collector_of_all_signals_receives_spans(monkeypatch):
    span = tracing.Span(name="x", context=CONTEXT, parent_id=None, started_at=1.0, ended_at=2.0)
    with collector.running() as receiver:
        address = receiver.endpoint.removesuffix("/v1/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        exporter = tracing.make_exporter(settings())
        exporter.export([span])
        exporter.close()

        assert [span.name for span in receiver.spans] == ["x"]


def test_close_gives_up_on_a_collector_that_does_not_answer(monkeypatch, caplog):
    monkeypatch.setattr(otlp, "CLOSE_S", 0.05)
    exporter = tracing.make_exporter(
        settings(otel_exporter_otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    )
    exporter.export(
        [tracing.Span(name="x", context=CONTEXT, parent_id=None, started_at=1.0, ended_at=2.0)]
    )
    exporter.close()

    # of the export: between two tries or, if the timer was earlier, before the first one
    assert "aborting retry" in caplog.text or "already shutdown" in caplog.text


def test_trace_of_a_caller_keeps_its_id_and_sampling_decision():
    trace, parent_id = tracing.start_span(CONTEXT.headers(), ratio=0.0)

    assert (trace.trace_id, trace.is_sampled, trace.state) == (CONTEXT.trace_id, True, "v=1")
    assert trace.span_id != CONTEXT.span_id
    assert parent_id == CONTEXT.span_id


@pytest.mark.parametrize("headers", [{}, {"traceparent": "broken", "tracestate": "v=1"}])
def test_request_without_a_valid_traceparent_begins_a_new_trace(headers):
    trace, parent_id = tracing.start_span(headers, ratio=1.0)

    assert trace.is_sampled
    assert trace.state == ""
    assert parent_id is None


def test_ratio_is_the_share_of_new_traces_that_are_sampled():
    sampled = [tracing.start_span({}, ratio=0.25)[0].is_sampled for _ in range(4000)]

    assert 850 < sum(sampled) < 1150


def test_process_without_an_exporter_forwards_the_trace_unchanged():
    assert tracing.forward_trace(CONTEXT.headers()) == (CONTEXT, None)
    assert tracing.forward_trace({}) == (None, None)


def test_process_without_an_exporter_replaces_a_malformed_trace():
    trace, _ = tracing.forward_trace({"traceparent": "00-1-2-3"})

    assert trace_context.read(trace.headers()) == trace
    assert not trace.is_sampled


def test_stage_without_both_times_makes_no_span():
    wall = tracing.wall_clock(now=100.0, wall=1000.0)
    stages = [
        tracing.Stage("a", 90.0, 95.0, {"tier": "host"}),
        tracing.Stage("b", 95.0, None),
        tracing.Stage("c", None, None),
    ]
    (span,) = tracing.stage_spans(CONTEXT, stages, wall)

    assert (span.name, span.started_at, span.ended_at) == ("a", 990.0, 995.0)
    assert span.attributes == {"tier": "host"}
    assert (span.context.trace_id, span.parent_id) == (CONTEXT.trace_id, CONTEXT.span_id)
