"""Stages and pages of requests."""

import msgspec
import pytest

from dynamo.console import request_rows
from dynamo.console.request_rows import RequestQuery, Stages


def stages(*ends):
    names = ("prepared_at", "opened_at", "first_token_at", "ended_at")
    times = dict.fromkeys(names) | dict(zip(names, ends, strict=False))
    return Stages(arrived_at=10.0, **times)


@pytest.mark.parametrize(
    ("ends", "error", "state"),
    [
        ((), "", "preparing"),
        ((11.0,), "", "routing"),
        ((11.0, 12.0), "", "prefill"),
        ((11.0, 12.0, 13.0), "", "streaming"),
        ((11.0, 12.0, 13.0, 14.0), "", "done"),
        ((11.0, None, None, 14.0), "overload", "failed"),
    ],
)
def test_state_is_the_stage_that_is_under_way(ends, error, state):
    assert request_rows.state_of(stages(*ends), error) == state


def test_durations_of_an_ended_request_add_up_to_its_time():
    found = request_rows.durations_ms(stages(10.001, 10.003, 10.023, 10.123), now=99.0)

    assert found == {
        "prepare_ms": 1.0, "route_ms": 2.0, "prefill_ms": 20.0, "decode_ms": 100.0, "ttft_ms": 23.0
    }  # fmt: skip


def test_stage_under_way_lasts_until_now_and_later_ones_are_absent():
    found = request_rows.durations_ms(stages(10.5), now=12.0)

    assert found == {
        "prepare_ms": 500.0, "route_ms": 1500.0, "prefill_ms": None, "decode_ms": None, "ttft_ms": None
    }  # fmt: skip


def test_query_selects_by_model_and_state_and_place():
    query = RequestQuery(model="a", state="open", offset=2, limit=3)

    assert query.matches("a", "open")
    assert not query.matches("b", "open")
    assert not query.matches("a", "done")
    assert list(range(10))[query.places] == [2, 3, 4]
    assert RequestQuery().matches("b", "failed")


def test_query_finds_requests_by_a_name_with_capital_letters():
    assert RequestQuery(model="Qwen/Qwen3").matches("qwen/qwen3", "done")


@pytest.mark.parametrize(
    "fields",
    [{"offset": "-1"}, {"limit": "0"}, {"limit": "201"}, {"state": "x"}, {"status": "done"}],
)
def test_query_refuses_what_is_out_of_bounds(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, RequestQuery, strict=False)
