"""Strangers get seconds and a bounded number of places."""

import socket

import pytest

from dynamo.transfer import descriptors, handshake, routes, service
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link
from transfer_peer import LAYOUT


@pytest.fixture
def serve():
    """Start a service; gives a way to dial it."""
    started = []

    def start(**options):
        listening = socket.create_server(("127.0.0.1", 0))
        region = descriptors.Region(memory=memoryview(bytearray(16)), layout=LAYOUT)
        exposed = routes.Exposed(
            name="prefill-0", epoch="e", region=region, shared=None, deliver=lambda *said: None
        )
        made = service.Service(listening, exposed, token=b"", check=lambda link: None, **options)
        started.append(made)
        return lambda: socket.create_connection(listening.getsockname(), timeout=10)

    yield start
    for made in started:
        made.close()


def is_closed(sock):
    while sock.recv(4096):
        pass
    return True


def test_a_stranger_who_says_nothing_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(service, "GREETING_LIMIT_S", 0.05)
    dial = serve()

    with dial() as sock:
        assert is_closed(sock)


def test_one_connection_more_than_there_are_places_is_closed_at_once(serve):
    dial = serve(max_connections=1)
    first = Link(dial())
    handshake.enter(first, name="decode-0", epoch="e", token=b"", limit=Limit(10))

    with dial() as sock:
        assert sock.recv(1) == b""
    first.close()


def test_a_peer_that_has_left_makes_room(serve):
    dial = serve(max_connections=1)

    for _ in range(20):
        with dial() as sock:
            assert sock.recv(1)
            sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
