"""A limit ends what works under it."""

import math

import pytest

from dynamo.base import errors
from dynamo.transfer.limit import MAX_DEADLINE_S, Limit


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan, math.inf, MAX_DEADLINE_S + 1])
def test_a_deadline_is_a_bounded_time(deadline_s):
    with pytest.raises(errors.LocalProtocolError, match="deadline_s"):
        Limit(deadline_s)


def test_what_remains_shrinks_and_is_then_an_error():
    limit = Limit(1e-9)

    with pytest.raises(errors.TransferError, match="not complete within 1e-09 s"):
        limit.remaining_s()


def test_cancel_interrupts_a_wait_and_forbids_the_next():
    limit, interrupted = Limit(10), []

    with limit.interruptible(lambda: interrupted.append(True)):
        limit.cancel()

    assert interrupted == [True]
    with pytest.raises(errors.TransferError, match="cancelled"):
        limit.remaining_s()
    with pytest.raises(errors.TransferError, match="cancelled"), limit.interruptible(print):
        pytest.fail("it was entered")


def test_cancel_after_the_wait_interrupts_nothing():
    limit, interrupted = Limit(10), []
    with limit.interruptible(lambda: interrupted.append(True)):
        pass

    limit.cancel()

    assert interrupted == []
