"""KV transfer parameters on the wire, and on their way from the prefill engine to the decode engine."""

import msgspec
import pytest

import kv_params
from dynamo.base import errors
from dynamo.protocols import generate, kv_transfer

LOGPROBS = generate.TokenLogprobs(-0.5, (generate.TopLogprob(4, -0.5),))


def decoded(encoded):
    return msgspec.msgpack.decode(encoded, type=kv_transfer.KvTransferParams)


@pytest.mark.parametrize(
    "params",
    [
        kv_transfer.COMPUTE_LOCALLY,
        kv_transfer.PREFILL_ONLY,
        kv_transfer.PREFILL_WITH_TOKEN,
        kv_params.at_remote(first_token=kv_transfer.FirstToken(4, LOGPROBS, 16)),
        kv_params.of_connector(remote_block_ids=[[1, 2]], remote_host="h"),
        kv_transfer.KvTransferParams(
            report=kv_transfer.TransferReport(transfer_ms=1.5, num_blocks=2)
        ),
    ],
)
def test_parameters_arrive_as_they_were_sent(params):
    assert decoded(msgspec.msgpack.encode(params)) == params


def test_negative_first_token_is_refused():
    wire = {"remote": {"remote_block_ids": [1], "remote_hold_id": 7, "first_token": [-1]}}

    with pytest.raises(msgspec.ValidationError, match="first_token"):
        decoded(msgspec.msgpack.encode(wire))


def test_blocks_of_a_foreign_engine_are_refused():
    params = kv_params.of_connector(remote_port=1)

    with pytest.raises(errors.RemoteProtocolError, match=r"got the fields \['remote_port'\]"):
        kv_transfer.remote_blocks(params)


@pytest.mark.parametrize("params", [None, kv_transfer.COMPUTE_LOCALLY, kv_transfer.PREFILL_ONLY])
def test_prompt_of_no_other_engine_has_no_remote_blocks(params):
    assert kv_transfer.remote_blocks(params) is None


def test_lease_is_shorter_by_the_time_since_the_prefill_was_requested():
    params = kv_params.at_remote(remote_hold_s=60.0)

    assert kv_transfer.pass_on(params, 2.5, 100) == kv_params.with_remote(
        params, remote_hold_s=57.5
    )
    assert kv_transfer.pass_on(params, 2.5, 100, delivery_s=5.0) == kv_params.with_remote(
        params, remote_hold_s=52.5
    )


@pytest.mark.parametrize(
    ("prefill_s", "num_cached", "limit_s"),
    [(3.0, 0, 3.0), (3.0, 75, 12.0), (0.1, 0, 0.1), (3.0, None, None)],
)
def test_copy_may_take_as_long_as_computing_the_prompt_would(prefill_s, num_cached, limit_s):
    first_token = kv_transfer.FirstToken(7, cached_tokens=num_cached)
    params = kv_params.at_remote(first_token=first_token)
    passed_on = kv_transfer.pass_on(params, prefill_s, 100, delivery_s=5.0)

    assert passed_on.remote.copy_limit_s == limit_s


def test_foreign_parameters_are_passed_on_unchanged():
    params = kv_params.of_connector(remote_hold_s="x")

    assert kv_transfer.pass_on(params, 2.5, 100) is params


def test_parameters_without_blocks_are_not_passed_on():
    assert kv_transfer.pass_on(kv_transfer.COMPUTE_LOCALLY, 1.0, 100) is None
