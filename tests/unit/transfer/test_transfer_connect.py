"""A connection for KV blocks over TCP: an attempt that is not answered is followed by another one."""

import socket

import pytest

from dynamo.base import errors
from dynamo.transfer import api
from dynamo.transfer.backends import tcp


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def lose(monkeypatch, num_lost):
    """Lose the first attempts to connect; return the time limits of all attempts."""
    connect, limits = socket.create_connection, []

    def create_connection(address, timeout):
        limits.append(timeout)
        if len(limits) <= num_lost:
            raise TimeoutError("timed out")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return limits


def test_lost_attempt_is_followed_by_another_one(listening, monkeypatch):
    limits = lose(monkeypatch, 2)
    port = listening.getsockname()[1]
    sock = tcp._connect("127.0.0.1", port, api.TimeLimit(60.0), lambda sock: sock)
    sock.close()

    assert limits == [tcp._ATTEMPT_S] * 3


def test_last_attempt_names_the_worker_that_did_not_answer(listening, monkeypatch):
    limits = lose(monkeypatch, 1)
    limit = api.TimeLimit(tcp._ATTEMPT_S / 2)
    with pytest.raises(
        errors.TransferError, match=r"cannot connect to the worker at 127.0.0.1:7: "
    ):
        tcp._connect("127.0.0.1", 7, limit, lambda sock: sock)

    assert len(limits) == 1
