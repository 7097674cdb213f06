"""W3C Trace Context: what is valid is passed on, what is broken counts as absent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
digits = st.sampled_from("0123456789abcdef")


def test_a_valid_parent_is_read():
    found = trace_context.read({"traceparent": PARENT, "tracestate": "a=1, b@c=2"})

    assert found == trace_context.TraceContext(TRACE, SPAN, 1, "a=1,b@c=2")
    assert found.is_sampled
    assert found.headers() == {"traceparent": PARENT, "tracestate": "a=1,b@c=2"}


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
def test_a_broken_parent_is_none(broken):
    assert trace_context.read({"traceparent": broken}) is None


def test_a_later_version_may_say_more():
    found = trace_context.read({"traceparent": f"cc-{TRACE}-{SPAN}-03-what-the-future-holds"})

    assert found == trace_context.TraceContext(TRACE, SPAN, 1)


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
def test_a_broken_state_is_dropped_and_the_parent_stays(state):
    found = trace_context.read({"traceparent": PARENT, "tracestate": state})

    assert found == trace_context.TraceContext(TRACE, SPAN, 1)


@given(st.text(digits, min_size=32, max_size=32), st.text(digits, min_size=16, max_size=16))
def test_what_is_told_is_read_back(trace_id, span_id):
    told = trace_context.TraceContext(trace_id, span_id, 0)
    is_valid = bool(int(trace_id, 16)) and bool(int(span_id, 16))

    assert trace_context.read(told.headers()) == (told if is_valid else None)


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_header_breaks_it(parent, state):
    found = trace_context.read({"traceparent": parent, "tracestate": state})

    assert found is None or found.headers()["traceparent"].startswith("00-")
