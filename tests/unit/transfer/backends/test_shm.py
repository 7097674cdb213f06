"""What a connection over a Unix socket leaves behind when its time is over."""

import gc

import pytest

from dynamo.base import errors
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.backends import shm


def test_connection_that_is_too_late_opens_no_socket():
    limit = TimeLimit(1)
    limit.cancel()

    with pytest.raises(errors.TransferError, match="cancelled"):
        shm.connect("nobody", limit)
    gc.collect()  # a socket that nobody closed fails the test here
