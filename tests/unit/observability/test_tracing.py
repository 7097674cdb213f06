"""Traces are told if the operator wants it, to a collector that exists only then."""

import sys

import pytest

import collector
from dynamo.base import errors
from dynamo.observability import otlp, spans, tracing
from dynamo.protocols import trace_context

CONTEXT = trace_context.TraceContext("a" * 32, "b" * 16, 1, "v=1")


def settings(**fields):
    return tracing.TracingConfig(otel_export_enabled=True, **fields)


def test_by_default_there_is_no_exporter():
    assert tracing.exporter(tracing.TracingConfig()) is None


def test_an_endpoint_must_be_a_url():
    with pytest.raises(errors.ConfigError, match=r"OTLP over HTTP.*got 'localhost:4317'"):
        tracing.exporter(settings(otel_exporter_otlp_traces_endpoint="localhost:4317"))


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "dynamo.observability.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(errors.ConfigError, match=r"make setup EXTRAS=otel"):
        tracing.exporter(settings())


def test_a_collector_gets_the_spans_as_they_were():
    root = spans.Span(
        name="http-request",
        context=CONTEXT,
        parent_id="c" * 16,
        started_at=1700000000.0,
        ended_at=1700000001.5,
        kind="server",
        attributes={"model": "m", "output_tokens": 7},
        error="overload",
    )
    with collector.running() as found:
        exporter = tracing.exporter(
            settings(otel_exporter_otlp_traces_endpoint=found.endpoint, otel_service_name="mine")
        )
        exporter.export([root])
        exporter.close()
        (span,) = found.spans

    assert found.services == {"mine"}
    assert (span.trace_id.hex(), span.span_id.hex()) == (CONTEXT.trace_id, CONTEXT.span_id)
    assert span.parent_span_id.hex() == "c" * 16
    assert (span.end_time_unix_nano - span.start_time_unix_nano) == 1_500_000_000
    assert collector.attributes(span) == {"model": "m", "output_tokens": 7}
    assert (span.kind, span.trace_state) == (2, "v=1")
    assert (span.status.code, span.status.message) == (2, "overload")


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(otlp, "CLOSE_S", 0.05)
    exporter = tracing.exporter(
        settings(otel_exporter_otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    )
    exporter.export(
        [spans.Span(name="x", context=CONTEXT, parent_id=None, started_at=1.0, ended_at=2.0)]
    )
    exporter.close()

    assert "aborting retry" in caplog.text  # it would have gone on
