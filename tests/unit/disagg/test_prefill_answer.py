"""A prefill's only output."""

import pytest

import kv_params
from dynamo.base import errors
from dynamo.disagg import prefill_answer
from dynamo.protocols import generate

PARAMS = kv_params.at_remote()


async def test_the_first_end_counts():
    answer = prefill_answer.PrefillAnswer()
    answer.receive(generate.Output((1,)))  # says nothing
    answer.receive(generate.Output((1,), kv_transfer_params=PARAMS))
    answer.ended(errors.WorkerLost("x"))
    answer.give_up()

    assert await answer.wait() == PARAMS


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda answer: answer.ended(None), errors.RemoteProtocolError),
        (lambda answer: answer.ended(errors.WorkerLost("x")), errors.WorkerLost),
        (lambda answer: answer.replied(b""), errors.RemoteProtocolError),
        (lambda answer: answer.give_up(), errors.Cancelled),
    ],
)
async def test_whatever_else_ends_it_is_raised(end, error):
    answer = prefill_answer.PrefillAnswer()
    end(answer)

    with pytest.raises(error):
        await answer.wait()
