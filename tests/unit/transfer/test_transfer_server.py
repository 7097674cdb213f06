"""Strangers get seconds and a bounded number of places."""

import errno
import socket
import threading

import pytest

from dynamo.base import errors, membership
from dynamo.transfer import api, descriptors, link_pool, server
from dynamo.transfer import link as links
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import Link, new_authenticator
from transfer_peer import LAYOUT
from waiting import PATIENT_S


@pytest.fixture
def serve():
    """Start a service; gives a way to dial it."""
    started = []

    def start(*, deliver=lambda *said: None, **options):
        listening = socket.create_server(("127.0.0.1", 0))
        region = descriptors.Region(memory=memoryview(bytearray(16)), layout=LAYOUT)
        exposed = api.Exposed(
            name="prefill-0", epoch="e", region=region, descriptor=None, deliver=deliver
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


class BusyPool:
    """The links to a server, and an operation that lasts on one of them."""

    def __init__(self, serve, **options):
        self._has_begun, self._may_end = threading.Semaphore(0), threading.Event()
        self.dial = serve(deliver=self._deliver, **options)
        self._threads = []

    def pool(self):
        def greet(link, limit):
            links.enter(
                link,
                limit,
                name="decode-0",
                epoch="e",
                authenticator=new_authenticator(membership.NO_CREDENTIALS),
            )

        return link_pool.LinkPool(lambda limit: Link(self.dial()), greet)

    def notify(self, pool):
        """Begin a notification that is answered after `end`."""
        thread = threading.Thread(target=pool.notify, args=(b"", TimeLimit(PATIENT_S)))
        thread.start()
        self._threads.append(thread)
        assert self._has_begun.acquire(timeout=PATIENT_S)

    def end(self):
        self._may_end.set()
        for thread in self._threads:
            thread.join(PATIENT_S)

    def _deliver(self, sender, message, limit):
        self._has_begun.release()
        assert self._may_end.wait(PATIENT_S)


def test_connection_beyond_the_limit_is_refused_with_the_reason_if_all_are_used(serve, monkeypatch):
    monkeypatch.setattr(server, "ROOM_S", 0.05)
    busy = BusyPool(serve, max_connections=1)
    pool = busy.pool()
    busy.notify(pool)

    with pytest.raises(errors.TransferError, match="there are 1 connections already, all in use"):
        enter(busy.dial)
    busy.end()
    pool.close()


def test_connection_beyond_the_limit_waits_for_one_that_is_closed(serve, monkeypatch):
    monkeypatch.setattr(server, "ROOM_S", PATIENT_S)
    busy = BusyPool(serve, max_connections=1)
    pool = busy.pool()
    busy.notify(pool)
    entered = []
    waiting = threading.Thread(target=lambda: entered.append(enter(busy.dial)))
    waiting.start()
    busy.end()
    pool.close()
    waiting.join(PATIENT_S)

    (link,) = entered
    link.close()


def test_idle_connection_gives_way_to_another_and_its_pool_opens_a_new_one(serve, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.0)
    busy = BusyPool(serve, max_connections=1)
    busy._may_end.set()
    pools = [busy.pool(), busy.pool()]
    for pool in (*pools, *pools):
        pool.notify(b"", TimeLimit(PATIENT_S))
    for pool in pools:
        pool.close()


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
