"""What can be said of the way over NIXL without a peer; with one: tests/contract/test_transfer.py."""

import os
import threading
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors
from dynamo.transfer import messages
from waiting import PATIENT_S

WORDS = [
    messages.NixlHello("decode-0", b"contact"),
    messages.NixlWelcome(),
    messages.NixlNotify(7, b"pulled", 1.5),
    messages.NixlHeard(7),
    messages.NixlRefused(7, "too busy"),
    messages.NixlBye(),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_nixl_message_survives_the_wire(word):
    assert messages.decode(messages.encode(word)) == word


@pytest.mark.parametrize("said", [b"", b"pulled", bytes(messages.MAX_BYTES + 1)])
def test_malformed_nixl_message_is_refused(said):
    with pytest.raises(errors.RemoteProtocolError, match="expected"):
        messages.decode(said)


def test_longest_notification_fits():
    longest = messages.NixlNotify(2**63, bytes(messages.MAX_NOTIFICATION_BYTES), 600.0)

    assert messages.decode(messages.encode(longest)) == longest


def test_malformed_nixl_address_is_refused():
    with pytest.raises(errors.TransferError, match="NIXL's address"):
        messages.decode_address(b"127.0.0.1:80")


PIECES = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**28)), max_size=20
)


@given(pieces=PIECES)
def test_stretches_are_the_same_bytes_in_bounded_lists(pieces):
    backend = pytest.importorskip("dynamo.transfer.backends.nixl", exc_type=ImportError)
    made = list(backend.stretches(pieces))

    assert all(0 < sum(n for *_, n in stretch) <= 64 * 2**20 for stretch in made)
    joined = []
    for local, remote, length in (piece for stretch in made for piece in stretch):
        if joined and (local, remote) == (
            joined[-1][0] + joined[-1][2],
            joined[-1][1] + joined[-1][2],
        ):
            local, remote, before = joined.pop()
            length += before
        joined.append((local, remote, length))
    assert sum(n for *_, n in joined) == sum(n for *_, n in pieces)
    assert {piece[:2] for piece in joined} <= {piece[:2] for piece in pieces}


def test_many_short_pieces_are_several_stretches():
    backend = pytest.importorskip("dynamo.transfer.backends.nixl", exc_type=ImportError)
    pieces = [(i * 8, i * 16, 8) for i in range(messages.MAX_PIECES + 1)]

    lengths = [len(stretch) for stretch in backend.stretches(pieces)]

    assert lengths == [messages.MAX_PIECES, 1]


def test_nixl_serves_other_hosts_only_if_insecure(monkeypatch):
    backend = pytest.importorskip("dynamo.transfer.backends.nixl", exc_type=ImportError)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)

    with pytest.raises(errors.ConfigError, match="say --insecure"):
        backend.NixlBackend(host="10.1.2.3")

    backend.NixlBackend(host="10.1.2.3", is_insecure=True)
    assert "UCX_NET_DEVICES" not in os.environ
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")  # what the user says there counts
    backend.NixlBackend()
    assert os.environ["UCX_NET_DEVICES"] == "eth7"


class EndpointWithoutPeers:
    """An endpoint that reaches no peer: it records those that it has."""

    def __init__(self):
        self.peers, self.received = [], [("decode-0", messages.encode(WORDS[0]))]
        self.has_sent = threading.Event()

    def add_peer(self, contact):
        self.peers.append("decode-0")
        return "decode-0"

    def remove_peer(self, peer):
        self.peers.remove(peer)

    def receive(self):
        received, self.received = self.received, []
        return received

    def send(self, peer, message):
        self.has_sent.set()
        raise errors.TransferError("it has gone")

    def close(self):
        pass


def test_peer_that_cannot_be_reached_is_removed():
    backend = pytest.importorskip("dynamo.transfer.backends.nixl", exc_type=ImportError)
    endpoint = EndpointWithoutPeers()
    server = backend.NixlServer(endpoint, types.SimpleNamespace(name="prefill-0"))
    assert endpoint.has_sent.wait(PATIENT_S)
    server.close()

    assert endpoint.peers == []
