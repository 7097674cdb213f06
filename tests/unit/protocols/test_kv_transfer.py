"""How one engine tells another where a prompt's keys and values are."""

import msgspec
import pytest

from dynamo.base import errors
from dynamo.protocols import generate, kv_transfer

LOGPROBS = generate.TokenLogprobs(-0.5, (generate.TopLogprob(4, -0.5),))


def place(**fields):
    return kv_transfer.RemoteBlocks(
        remote_block_ids=(1, 2),
        remote_engine_id="e",
        remote_host="h",
        remote_port=1,
        remote_hold_id=7,
        **fields,
    )


def request(*, n=1, logprobs=None, prompt_logprobs=None):
    return generate.Request(
        id="r",
        model="m",
        token_ids=b"",
        sampling_options=generate.SamplingOptions(n=n),
        output_options=generate.OutputOptions(logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )


def test_it_arrives_as_it_was_sent():
    sent = place(first_token=kv_transfer.FirstToken(4, LOGPROBS, 16))
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.as_params()))

    assert kv_transfer.read(travelled) == kv_transfer.read(sent.as_params()) == sent


def test_a_token_is_no_negative_number():
    params = place().as_params() | {"first_token": [-1, None]}

    with pytest.raises(errors.RemoteProtocolError, match="first_token"):
        kv_transfer.read(params)


@pytest.mark.parametrize(
    ("asked", "has_logprobs", "is_taken"),
    [
        (request(), False, True),
        (request(logprobs=1), True, True),
        (request(), True, False),
        (request(logprobs=1), False, False),
        (request(n=2), False, False),
        (request(prompt_logprobs=0), False, False),
    ],
)
def test_a_token_is_taken_over_if_it_says_all_that_is_wanted(asked, has_logprobs, is_taken):
    first = kv_transfer.FirstToken(4, LOGPROBS if has_logprobs else None)

    assert kv_transfer.first_of(asked, place(first_token=first)) == (first if is_taken else None)


def test_without_a_token_none_is_taken_over():
    assert kv_transfer.first_of(request(), place()) is None
    assert kv_transfer.first_of(request(), None) is None


def test_only_who_asks_for_a_token_wants_it():
    assert not kv_transfer.wants_token(kv_transfer.ASK)
    assert not kv_transfer.wants_token(None)
    assert kv_transfer.wants_token(kv_transfer.ASK_WITH_TOKEN)
    assert kv_transfer.wants_hold(kv_transfer.ASK_WITH_TOKEN)
