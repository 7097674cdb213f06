"""W3C Trace Context: valid headers are forwarded, malformed ones count as absent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
digits = st.sampled_from("0123456789abcdef")


def test_valid_traceparent_is_read():
    context = trace_context.read({"traceparent": PARENT, "tracestate": "a=1, b@c=2"})

    assert context == trace_context.TraceContext(TRACE, SPAN, 1, "a=1,b@c=2")
    assert context.is_sampled
    assert context.headers() == {"traceparent": PARENT, "tracestate": "a=1,b@c=2"}


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "junk",
        PARENT[:-1],
        PARENT + "-more",  # version 00 has four parts
        PARENT.upper(),
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-zz",
        f"{PARENT},{PARENT}",  # the header came twice
    ],
)
def test_malformed_traceparent_is_none(broken):
    assert trace_context.read({"traceparent": broken}) is None


def test_later_version_may_have_more_parts():
    context = trace_context.read({"traceparent": f"cc-{TRACE}-{SPAN}-03-what-the-future-holds"})

    assert context == trace_context.TraceContext(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "state",
    [
        "no-value",
        "a=1,a=2",
        "A=1",
        "a= ",
        ",".join(f"k{n}=1" for n in range(33)),
        "a=" + "x" * 600,
        "a=1,=2",
    ],
)
def test_malformed_tracestate_is_dropped_and_traceparent_kept(state):
    context = trace_context.read({"traceparent": PARENT, "tracestate": state})

    assert context == trace_context.TraceContext(TRACE, SPAN, 1)


@given(st.text(digits, min_size=32, max_size=32), st.text(digits, min_size=16, max_size=16))
def test_written_headers_are_read_back(trace_id, span_id):
    written = trace_context.TraceContext(trace_id, span_id, 0)
    is_valid = bool(int(trace_id, 16)) and bool(int(span_id, 16))

    assert trace_context.read(written.headers()) == (written if is_valid else None)


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_header_is_read_without_an_error(parent, state):
    context = trace_context.read({"traceparent": parent, "tracestate": state})

    assert context is None or context.headers()["traceparent"].startswith("00-")
