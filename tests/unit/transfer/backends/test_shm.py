"""What a connection over a Unix socket leaves behind when its time is over."""

import errno
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


def test_connection_without_a_free_file_is_an_error_of_the_transfer(monkeypatch):
    def refuse(*kind):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(shm.socket, "socket", refuse)

    with pytest.raises(errors.TransferError, match=r"on this host: .*Too many open files"):
        shm.connect("nobody", TimeLimit(1))
