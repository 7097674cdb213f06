"""A worker tells its logs and a collector which request it works on."""

import pytest
from worker_fakes import FakeCall, make_request

from dynamo.base import errors
from dynamo.observability import logs, tracing
from dynamo.protocols import generate, trace_context
from dynamo.worker import inflight

PARENT = trace_context.TraceContext("a" * 32, "b" * 16, 1)
HEADERS = {**PARENT.headers(), "x-request-id": "mine"}
OUTPUT = generate.Output((7,))
WORKER = 0x1F


class Exported:
    def __init__(self):
        self.spans = []

    def export(self, found):
        self.spans += found

    def close(self):
        """Nothing waits."""


class Clock:
    """Moves when told."""

    at = 0.0

    def now(self):
        return self.at

    def wall(self):
        return 1000.0 + self.at


def call(**headers):
    made = FakeCall(make_request())
    made.headers = headers
    return made


@pytest.fixture
def exported():
    return Exported()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def taken():
    return []


@pytest.fixture
def take(exported, clock, taken):
    return inflight.traced(taken.append, exported, 1.0, clock, WORKER)


def test_log_lines_of_a_call_name_its_request():
    seen = []
    take = inflight.logged(lambda _: seen.append(logs.log_context.get()))
    take(call(**HEADERS))

    assert seen == [logs.LogContext("handle_payload", "mine", PARENT)]
    assert logs.log_context.get() is None


def test_call_has_a_span_with_prefill_and_decode(take, taken, exported, clock):
    first = call(**HEADERS)
    take(first)
    clock.at = 2.0
    taken[0].send(OUTPUT)
    clock.at = 3.0
    taken[0].send(OUTPUT)
    taken[0].finish()
    root, prefill, decode = exported.spans

    assert (root.name, root.parent_id, root.error) == ("handle_payload", PARENT.span_id, None)
    assert root.context.trace_id == PARENT.trace_id
    assert root.attributes == {
        "x_request_id": "mine",
        "worker_id": "1f",
        "endpoint": first.endpoint,
    }
    assert (root.started_at, root.ended_at) == (1000.0, 1003.0)
    assert (prefill.name, prefill.started_at, prefill.ended_at) == ("prefill", 1000.0, 1002.0)
    assert (decode.name, decode.started_at, decode.ended_at) == ("decode", 1002.0, 1003.0)
    assert {prefill.parent_id, decode.parent_id} == {root.context.span_id}
    assert first.sent == [OUTPUT, OUTPUT]
    assert first.num_finished == 1


def test_what_a_handler_measures_and_begins_elsewhere_belongs_to_the_span(exported, clock):
    def handle(timed):
        record = tracing.stage_record.get()
        record.stages.append(tracing.Stage("transfer", 1.0, 2.0, {"tier": "disk"}))
        record.attributes["cached_tokens.disk"] = 16
        timed.send(generate.Output((7,), cached_tokens=48, tier_tokens=(("host", 32),)))
        timed.finish()
        begun_elsewhere.append(timed.headers)

    begun_elsewhere = []
    inflight.traced(handle, exported, 1.0, clock, WORKER)(call(**HEADERS))
    root, transfer, *_ = exported.spans
    (headers,) = begun_elsewhere

    assert trace_context.read(headers) == root.context
    assert headers["x-request-id"] == "mine"
    assert (transfer.name, transfer.parent_id) == ("transfer", root.context.span_id)
    assert (transfer.started_at, transfer.ended_at) == (1001.0, 1002.0)
    assert root.attributes["cached_tokens"] == 48
    assert root.attributes["cached_tokens.host"] == 32
    assert root.attributes["cached_tokens.disk"] == 16
    assert transfer.attributes == {"tier": "disk"}
    assert tracing.stage_record.get() is None


def test_later_tokens_go_to_the_call_directly(take, taken):
    inner = call(**HEADERS)
    take(inner)
    taken[0].send(OUTPUT)

    assert taken[0].send == inner.send


def test_span_of_a_failed_or_cancelled_call_has_the_reason(take, taken, exported):
    failing, leaving = call(**HEADERS), call(**HEADERS)
    take(failing)
    take(leaving)
    told = []
    taken[1].on_cancel(lambda: told.append("left"))
    taken[0].fail(errors.Overloaded("x"))
    leaving.cancel()

    assert [span.error for span in exported.spans] == ["overloaded", "cancelled"]
    assert told == ["left"]


def test_call_that_is_not_sampled_is_unchanged(take, taken, exported):
    quiet = call(traceparent=f"00-{'a' * 32}-{'b' * 16}-00")
    take(quiet)

    assert taken == [quiet]
    assert exported.spans == []
