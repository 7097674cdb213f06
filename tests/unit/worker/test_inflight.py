"""Requests between the plane and the engine."""

import asyncio
import types

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_fakes import FakeCall, FakeEngine, make_load, make_request

import kv_params
from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import blocks, generate, instances, model_errors
from dynamo.worker import health, inflight

ENDPOINT = instances.EndpointName("dynamo", "backend", "generate")
END = generate.FinishReason.EOS


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def counts():
    return health.WorkerMetrics(ENDPOINT, clocks.SystemClock())


@pytest.fixture
def table(engine, counts):
    return inflight.InFlight(engine, limit=2, counters=counts, clock=clocks.SystemClock())


def take(table, request=None):
    call = FakeCall(request or make_request())
    table.handle(call)
    return call


def output(request_id="r", token=7, *, end=None, index=0):
    return api.EngineOutput(request_id, generate.Output((token,), end, index))


def test_outputs_of_the_engine_are_sent_to_the_call(table, engine):
    call = take(table)
    table.outputs([output(token=7), output(token=8, end=END)])

    assert engine.submitted == [make_request()]
    assert [o.token_ids for o in call.sent] == [(7,), (8,)]
    assert call.num_finished == 1
    assert len(table) == 0


@pytest.mark.parametrize("reason", ["at capacity", "asleep", "refused by the engine"])
def test_refused_call_gives_back_the_blocks_that_another_engine_keeps_for_it(table, engine, reason):
    released = []
    peer = types.SimpleNamespace(release_remote=released.append)
    engine.capabilities = api.EngineCapabilities(kv_transfer=peer)
    params = kv_params.at_remote()
    prefilled = msgspec.structs.replace(make_request(), kv_transfer_params=params)
    match reason:
        case "at capacity":
            take(table, make_request("a"))
            take(table, make_request("b"))
        case "asleep":
            table.hand_over(errors.WorkerLost("asleep"))
        case _:
            engine.refusal = errors.InvalidRequest("no")
    refused = take(table, prefilled)

    assert refused.error is not None
    assert released == [params]


async def test_draining_worker_finishes_running_requests_and_refuses_new_ones(table):
    asleep = errors.WorkerLost("asleep")
    running = take(table)
    leaving = asyncio.create_task(table.drain(asleep, 60))
    await asyncio.sleep(0)
    late = take(table, make_request("late"))

    assert not leaving.done()
    assert (type(late.error), str(late.error)) == (errors.WorkerLost, "asleep")

    table.outputs([output(end=END)])
    await leaving

    assert (running.num_finished, running.error) == (1, None)


async def test_drain_hands_over_late_requests_and_can_be_reopened(table, engine):
    call = take(table)
    await table.drain(errors.WorkerLost("asleep"), 0)

    assert str(call.error) == "asleep"
    assert engine.aborted == ["r"]

    table.reopen()
    again = take(table)

    assert again.error is None
    assert len(table) == 1


def test_call_ends_after_the_last_choice(table):
    call = take(table, make_request(n=2))
    table.outputs([output(end=END, index=1)])
    assert call.num_finished == 0

    table.outputs([output(end=END, index=0)])

    assert call.num_finished == 1


def test_cancelled_choice_is_aborted_in_the_engine(table, engine):
    call = take(table, make_request(n=2))
    call.cancel_choice(1)
    call.cancel_choice(1)
    assert (engine.aborted, call.num_finished) == ([("r", 1)], 0)

    table.outputs([output(end=END, index=0)])
    call.cancel_choice(0)

    assert engine.aborted == [("r", 1)]
    assert call.num_finished == 1


def test_choice_that_ends_during_cancellation_is_counted_once(table, engine):
    call = take(table, make_request(n=2))
    table.outputs([output(end=END, index=1)])
    call.cancel_choice(1)

    assert (engine.aborted, call.num_finished, len(table)) == ([], 0, 1)


def test_cancelled_call_is_aborted_in_the_engine(table, engine):
    call = take(table)
    call.cancel()
    table.outputs([output()])

    assert engine.aborted == ["r"]
    assert call.sent == []
    assert len(table) == 0


def test_cancellation_after_the_end_is_ignored(table, engine):
    call = take(table)
    table.outputs([output(end=END)])
    call.cancel()

    assert engine.aborted == []


def test_two_requests_of_one_id_are_both_served(table, engine):
    first, second = take(table), take(table)
    other = engine.submitted[1].id
    table.outputs([output("r", 1, end=END), output(other, 2, end=END)])

    assert other != "r"
    assert first.sent[0].token_ids == (1,)
    assert second.sent[0].token_ids == (2,)


def test_more_than_the_limit_is_refused(table, engine):
    take(table, make_request("a"))
    take(table, make_request("b"))
    refused = take(table, make_request("c"))

    assert isinstance(refused.error, errors.Overloaded)
    assert str(refused.error) == "Server overloaded: worker at capacity"
    assert len(engine.submitted) == 2


def test_request_that_the_engine_refuses_fails_its_call(table, engine):
    engine.refusal = model_errors.ContextTooLong("too long")
    call = take(table)

    assert call.error is engine.refusal
    assert len(table) == 0


def test_request_that_the_engine_gives_up_fails_its_call_once(table):
    call = take(table)
    table.failed("r", errors.EngineFailed("no"))
    table.failed("r", errors.EngineFailed("no"))

    assert isinstance(call.error, errors.EngineFailed)


def test_request_that_is_handed_over_fails_as_worker_lost(table, engine):
    running = take(table)
    table.hand_over(errors.WorkerLost("out of memory"))
    late = take(table)

    assert isinstance(running.error, errors.WorkerLost)
    assert engine.aborted == ["r"]
    assert (type(late.error), str(late.error)) == (errors.WorkerLost, "out of memory")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xc1", errors.RemoteProtocolError),
        (msgspec.msgpack.encode(["no", "request"]), errors.RemoteProtocolError),
        (msgspec.msgpack.encode({"id": "r", "model": "m"}), errors.RemoteProtocolError),
        (make_request(n=0), errors.InvalidRequest),
        (make_request(n=2**40), errors.InvalidRequest),
        (generate.Request(id="r", model="m", token_ids=b""), errors.InvalidRequest),
        (generate.Request(id="r", model="m", token_ids=b"12345"), errors.InvalidRequest),
    ],
)
def test_malformed_request_does_not_reach_the_engine(table, engine, body, expected):
    call = FakeCall(body)
    table.handle(call)

    assert type(call.error) is expected
    assert engine.submitted == []


@given(st.binary(max_size=64))
def test_no_body_makes_the_decoder_raise_anything_but_our_errors(body):
    try:
        request = inflight.decode(msgspec.Raw(body))
    except (errors.RemoteProtocolError, errors.InvalidRequest):
        return

    assert blocks.count(request.token_ids) > 0


def test_requests_are_counted_by_how_they_ended(table, counts):
    take(table, make_request("a"))
    table.outputs([output("a", end=END)])
    take(table, make_request("b")).cancel()
    take(table, make_request("c"))
    table.failed("c", errors.EngineFailed("no"))
    text = counts.render([make_load(3)]).decode()
    at = 'dynamo_component="backend",dynamo_endpoint="generate",dynamo_namespace="dynamo"'

    assert f"dynamo_component_requests_total{{{at}}} 3.0" in text
    assert f"dynamo_component_inflight_requests{{{at}}} 0.0" in text
    assert f"dynamo_component_cancellation_total{{{at}}} 1.0" in text
    assert 'error_type="engine_failed"} 1.0' in text
    assert f"dynamo_component_request_duration_seconds_count{{{at}}} 3.0" in text
    assert "dynamo_component_kvstats_active_blocks 3.0" in text


@pytest.mark.parametrize("end", ["answered", "cancelled", "refused"])
def test_probe_of_the_engine_is_neither_counted_nor_logged(table, engine, counts, caplog, end):
    call = FakeCall(make_request("canary"))
    engine.refusal = errors.InvalidRequest("no") if end == "refused" else None
    with caplog.at_level("INFO", logger="dynamo"):
        table.handle(call, is_probe=True)
        if end == "answered":
            table.outputs([output("canary", end=END)])
        else:
            call.cancel()
    counted = [
        row
        for row in counts.render([]).decode().splitlines()
        if "dynamo_endpoint" in row and not row.endswith(" 0.0")
    ]

    assert (len(table), counted, messages_of(caplog)) == (0, [], [])
    assert (table.num_prompt_tokens, table.num_output_tokens) == (0, 0)
    assert not table.has_arrival.is_set()


def messages_of(caplog):
    return [record.getMessage() for record in caplog.records]


def test_log_of_an_aggregated_worker_names_each_request_and_its_length(table, caplog):
    with caplog.at_level("INFO", logger="dynamo"):
        take(table)

    assert messages_of(caplog) == [
        f"Prefilling locally for request r with length {make_request().prompt_len}",
        "Added request r.",
    ]


def test_log_of_a_worker_with_prefill_workers_leaves_the_place_of_the_prefill_to_them(
    engine, counts, caplog
):
    table = inflight.InFlight(
        engine, limit=2, counters=counts, clock=clocks.SystemClock(), is_aggregated=False
    )
    with caplog.at_level("INFO", logger="dynamo"):
        take(table)

    assert messages_of(caplog) == ["Added request r."]


def test_debug_log_says_when_a_request_begins_and_ends(table, caplog):
    with caplog.at_level("DEBUG", logger="dynamo"):
        take(table)
        table.outputs([output(end=END)])
    begin, *_, end = messages_of(caplog)

    assert begin == 'starting task to process python async generator stream request_id="r"'
    assert end == 'finished processing python async generator stream request_id="r"'


def test_tokens_are_counted_once_an_answer_has_begun(table):
    take(table)
    before = table.num_prompt_tokens
    table.outputs([output(token=7), output(token=8, end=END)])

    assert before == 0
    assert table.num_prompt_tokens == make_request().prompt_len
    assert table.num_output_tokens == 2


def test_request_at_which_the_engine_has_a_bug_is_open_no_longer(table, engine, counts):
    engine.refusal = KeyError("a bug")
    with pytest.raises(KeyError):  # the request plane answers the call
        take(table)

    assert len(table) == 0
    assert counts._inflight._value.get() == 0
