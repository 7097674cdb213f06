"""Which requests are told of, and when their stages were."""

import pytest

from dynamo.observability import spans
from dynamo.protocols import trace_context

PARENT = trace_context.TraceContext("a" * 32, "b" * 16, 1, "v=1")


def test_a_trace_that_comes_from_elsewhere_goes_on_and_keeps_its_mark():
    trace, parent_id = spans.enter(PARENT.headers(), ratio=0.0)

    assert (trace.trace_id, trace.is_sampled, trace.state) == (PARENT.trace_id, True, "v=1")
    assert trace.span_id != PARENT.span_id
    assert parent_id == PARENT.span_id


@pytest.mark.parametrize("headers", [{}, {"traceparent": "broken", "tracestate": "v=1"}])
def test_without_a_valid_one_a_new_trace_begins(headers):
    trace, parent_id = spans.enter(headers, ratio=1.0)

    assert trace.is_sampled
    assert trace.state == ""
    assert parent_id is None


def test_the_ratio_is_the_share_of_new_traces():
    chosen = [spans.enter({}, ratio=0.25)[0].is_sampled for _ in range(4000)]

    assert 850 < sum(chosen) < 1150


def test_where_no_spans_are_told_the_trace_goes_on_as_it_is():
    assert spans.pass_on(PARENT.headers()) == (PARENT, None)
    assert spans.pass_on({}) == (None, None)


def test_where_no_spans_are_told_a_broken_trace_is_begun_anew():
    trace, _ = spans.pass_on({"traceparent": "00-1-2-3"})

    assert trace_context.read(trace.headers()) == trace
    assert not trace.is_sampled


def test_stages_that_were_not_reached_make_no_span():
    wall = spans.wall_of(now=100.0, wall=1000.0)
    (made,) = spans.children(
        PARENT, [("a", 90.0, 95.0), ("b", 95.0, None), ("c", None, None)], wall
    )

    assert (made.name, made.started_at, made.ended_at) == ("a", 990.0, 995.0)
    assert (made.context.trace_id, made.parent_id) == (PARENT.trace_id, PARENT.span_id)
