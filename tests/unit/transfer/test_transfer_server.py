"""Strangers get seconds and a bounded number of places."""

import errno
import socket
import threading

import pytest

from dynamo.base import errors, membership
from dynamo.transfer import api, descriptors, server
from dynamo.transfer import link as links
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import Link, new_authenticator
from transfer_peer import LAYOUT
from waiting import PATIENT_S


@pytest.fixture
def serve():
    """Start a service; gives a way to dial it."""
    started = []

    def start(**options):
        listening = socket.create_server(("127.0.0.1", 0))
        region = descriptors.Region(memory=memoryview(bytearray(16)), layout=LAYOUT)
        exposed = api.Exposed(
            name="prefill-0", epoch="e", region=region, descriptor=None, deliver=lambda *said: None
        )
        made = server.TransferServer(
            listening,
            exposed,
            authenticator=new_authenticator(membership.NO_CREDENTIALS),
            **options,
        )
        started.append(made)
        return lambda: socket.create_connection(listening.getsockname(), timeout=PATIENT_S)

    yield start
    for made in started:
        made.close()


def is_closed(sock):
    while sock.recv(4096):
        pass
    return True


def test_silent_pending_connection_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(server, "GREETING_LIMIT_S", 0.05)
    dial = serve()

    with dial() as sock:
        assert is_closed(sock)


def enter(dial):
    link = Link(dial())
    try:
        links.enter(
            link,
            name="decode-0",
            epoch="e",
            authenticator=new_authenticator(membership.NO_CREDENTIALS),
            limit=TimeLimit(10),
        )
    except errors.TransferError:
        link.close()
        raise
    return link


def test_connection_beyond_the_limit_is_refused_with_the_reason(serve):
    dial = serve(max_connections=1)
    first = enter(dial)

    with pytest.raises(errors.TransferError, match="there are 1 connections already"):
        enter(dial)
    first.close()


def test_closed_connection_makes_room_for_another(serve):
    dial = serve(max_connections=1)

    for _ in range(20):
        link = enter(dial)
        link._sock.shutdown(socket.SHUT_WR)
        assert is_closed(link._sock)
        link.close()


def test_flood_of_pending_connections_takes_no_peers_place(serve, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 4)
    dial = serve(max_connections=1)
    strangers = [dial() for _ in range(40)]

    peer = enter(dial)
    has_gone = [is_closed(stranger) for stranger in strangers[:36]]
    num_threads = sum(t.name == "transfer-serve" for t in threading.enumerate())

    assert has_gone == [True] * 36
    assert num_threads <= 4 + 1
    for sock in strangers:
        sock.close()
    peer.close()


def test_connections_are_taken_again_after_a_moment_without_threads(serve, monkeypatch, caplog):
    dial = serve()
    start = threading.Thread.start
    refusals = [RuntimeError("can't start new thread")]

    def start_or_refuse(thread):
        if thread.name == "transfer-serve" and refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    with dial() as sock:
        assert is_closed(sock)

    enter(dial).close()
    assert "can't start new thread" in caplog.text


class FullSocket(socket.socket):
    """Takes no connection, as where no file descriptors are left, and counts the attempts."""

    def accept(self):
        self.attempts.release()
        raise OSError(errno.EMFILE, "Too many open files")


def test_connections_that_cannot_be_taken_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(server, "_PAUSE_S", 0.0)
    listening = FullSocket()
    listening.attempts = threading.Semaphore(0)
    listening.bind(("127.0.0.1", 0))
    region = descriptors.Region(memory=memoryview(bytearray(16)), layout=LAYOUT)
    exposed = api.Exposed(
        name="prefill-0", epoch="e", region=region, descriptor=None, deliver=lambda *said: None
    )
    authenticator = new_authenticator(membership.NO_CREDENTIALS)
    full = server.TransferServer(listening, exposed, authenticator=authenticator)
    for _ in range(5):
        assert listening.attempts.acquire(timeout=PATIENT_S)
    full.close()

    assert caplog.text.count("prefill-0 cannot take a peer's connection") == 1
