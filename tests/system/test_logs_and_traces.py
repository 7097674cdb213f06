"""One request, seen in the traces, logs and records of two real processes."""

import json

import httpx
import pytest
from deployment import MODEL, chat
from split import Split, prompt

import collector
from waiting import PATIENT_S, eventually

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FAST = ("--speedup-ratio", "1000000")


def rows_of(log):
    """The lines of JSON in a log."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_trace_covers_frontend_and_worker(deployment):
    with collector.running() as found:
        deployment.environ |= {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": found.endpoint,
            "OTEL_SERVICE_NAME": "here",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        frontend, worker = deployment.frontend(), deployment.mocker(*FAST)
        frontend.others = [worker]
        frontend.await_models([MODEL])
        httpx.post(
            f"{frontend.url}/v1/chat/completions",
            json=chat("hi", max_tokens=4),
            headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
            timeout=PATIENT_S,
        )
        spans = found.await_names("http-request", "preprocess", "handle_payload", "prefill")

    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["http-request"].parent_span_id.hex() == SPAN
    assert spans["handle_payload"].parent_span_id == spans["http-request"].span_id
    assert spans["prefill"].parent_span_id == spans["handle_payload"].span_id
    assert found.services == {"here"}


def test_trace_covers_the_prefill_worker_and_the_transfer(deployment):
    with collector.running() as found:
        deployment.environ |= {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": found.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        split = Split(deployment, "mocker")
        decode, _ = split.decode(*FAST), split.prefill(*FAST)
        split.ready(decode)
        split.ask(prompt(2000), max_tokens=2)
        found.await_names("http-request", "transfer", "remote_prefill")
        eventually(
            lambda: [span.name for span in found.spans].count("handle_payload") == 2,
            what="the spans of both workers",
        )
    answering, prefilling = (
        span
        for is_answering in (True, False)
        for span in found.spans
        if span.name == "handle_payload"
        and ("http-request" in parents(found, span)) is is_answering
    )

    assert len({span.trace_id for span in found.spans}) == 1
    assert parents(found, prefilling) == ["handle_payload"]
    assert prefilling.parent_span_id == answering.span_id
    for span in found.spans:
        if span.name in ("transfer", "remote_prefill"):
            assert span.parent_span_id == answering.span_id


def parents(found, child):
    """The names of a span's parents: one, or none if it begins the trace."""
    return [span.name for span in found.spans if span.span_id == child.parent_span_id]


def test_logs_of_frontend_and_worker_name_the_request(deployment):
    deployment.environ |= {
        "DYN_LOG": "warn,dynamo.frontend.request_records=debug,dynamo.worker.inflight=debug",
        "DYN_LOGGING_JSONL": "1",
    }
    frontend, worker = deployment.frontend(), deployment.mocker(*FAST)
    frontend.others = [worker]
    frontend.await_models([MODEL])
    httpx.post(
        f"{frontend.url}/v1/chat/completions",
        json=chat("hi", max_tokens=4),
        headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"},
        timeout=PATIENT_S,
    )
    eventually(lambda: rows_of(frontend.log), what="a line of the frontend")
    (at_door,) = [row for row in rows_of(frontend.log) if row.get("span_name")]
    of_worker = rows_of(worker.log)
    at_worker = [row for row in of_worker if row["message"].startswith("Added request")]

    assert (at_door["level"], at_door["span_name"]) == ("DEBUG", "http-request")
    assert [row["span_name"] for row in at_worker] == ["handle_payload"]
    for row in (at_door, *at_worker):
        assert (row["x_request_id"], row["trace_id"]) == ("mine", TRACE)


def test_queued_rows_are_written_when_a_frontend_stops(deployment, tmp_path):
    frontend = deployment.frontend(
        *("--audit-sinks", "jsonl", "--audit-output-path", str(tmp_path / "audit")),
        *("--audit-jsonl-flush-interval-ms", "600000"),
        *("--request-trace", "--request-trace-sinks", "jsonl"),
        *("--request-trace-output-path", str(tmp_path / "trace")),
    )
    frontend.others = [deployment.mocker(*FAST)]
    frontend.await_models([MODEL])
    frontend.chat("hi", max_tokens=4, store=True)
    frontend.end()
    (audited,), (traced,) = rows_of(tmp_path / "audit.jsonl"), rows_of(tmp_path / "trace.jsonl")

    assert audited["response"]["usage"]["completion_tokens"] == 4
    assert traced["request"]["output_tokens"] == 4
    assert traced["request"]["request_id"] == audited["request_id"]


BROKEN = [
    ("dynamo.frontend", "DYN_LOG", "loud", "DYN_LOG"),
    ("dynamo.mocker", "DYN_LOG", "loud", "DYN_LOG"),
    ("dynamo.frontend", "DYN_LOGGING_CONFIG_PATH", "/nowhere.toml", "DYN_LOGGING_CONFIG_PATH"),
    ("dynamo.mocker", "OTEL_TRACES_SAMPLER_ARG", "2", "OTEL_TRACES_SAMPLER_ARG"),
    ("dynamo.frontend", "DYN_AUDIT_SINKS", "nats", "not supported yet"),
    ("dynamo.frontend", "DYN_AUDIT_CAPACITY", "0", "DYN_AUDIT_CAPACITY"),
]


@pytest.mark.parametrize(("module", "variable", "value", "named"), BROKEN)
def test_wrong_setting_is_one_sentence(deployment, module, variable, value, named):
    deployment.environ |= {variable: value}
    process = deployment.run(module)
    process.may_end = True

    assert process.exit_code() == 2
    said = process.log.read_text()
    assert said.count("\n") == 1
    assert named in said
