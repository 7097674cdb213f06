"""Who knows the key is let in whatever the portions; nobody else is, whatever they say."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.base import errors, proof

RECORDED = (bytes(32), bytes([1]) * 32)
KEY = proof.derive_key(b"a cluster's token", "test")
nonces = st.binary(min_size=32, max_size=32)
keys = st.binary(min_size=1, max_size=40)


class Conversation:
    """Both sides, and what each has said."""

    def __init__(self, asker_key=KEY, answerer_key=KEY, nonces=RECORDED):
        self.asker = proof.ProofExchange(proof.client_steps(asker_key, nonces[0]))
        self.answerer = proof.ProofExchange(proof.server_steps(answerer_key, nonces[1]))
        self.output = {"asker": b"", "answerer": b""}

    def run(self, portion=1000):
        """Raises what the first to notice raises."""
        words = self.asker.first_output
        while words:
            self.output["asker"] += words
            reply = feed(self.answerer, words, portion)
            self.output["answerer"] += reply
            words = feed(self.asker, reply, portion)
        return self.output


def feed(exchange, data, portion):
    parts = [data[at : at + portion] for at in range(0, len(data), portion)]
    return b"".join(exchange.feed(part) for part in parts)


@given(key=keys, portion=st.integers(1, 80), asker=nonces, answerer=nonces)
def test_peers_with_the_same_key_are_accepted_however_bytes_are_split(
    key, portion, asker, answerer
):
    talk = Conversation(key, key, (asker, answerer))
    said = talk.run(portion)

    assert (talk.asker.is_complete, talk.answerer.is_complete) == (True, True)
    assert (len(said["asker"]), len(said["answerer"])) == (8 + 32 + 32, 8 + 32 + 32)


@given(ours=keys, theirs=keys)
def test_server_refuses_another_key_before_it_sends_its_proof(ours, theirs):
    talk = Conversation(ours + b"1", theirs + b"2")
    with pytest.raises(errors.RemoteProtocolError, match="another cluster token"):
        talk.run()

    assert talk.output["answerer"] == proof.GREETING + bytes([1]) * 32
    assert not talk.asker.is_complete


@given(said=st.binary(max_size=200))
def test_no_bytes_that_a_stranger_may_say_open_a_door(said):
    for steps in (proof.client_steps(KEY, bytes(32)), proof.server_steps(KEY, bytes(32))):
        exchange = proof.ProofExchange(steps)
        try:
            exchange.feed(said)
        except errors.RemoteProtocolError:
            continue
        assert not exchange.is_complete
        assert len(exchange.remainder) < 32


@given(said=st.binary(max_size=200))
def test_random_bytes_after_the_greeting_complete_no_exchange(said):
    for steps in (proof.client_steps(KEY, bytes(32)), proof.server_steps(KEY, bytes(32))):
        exchange = proof.ProofExchange(steps)
        try:
            exchange.feed(proof.GREETING + said)
        except errors.RemoteProtocolError:
            continue
        assert not exchange.is_complete
        assert len(said) < 64


@given(cut=st.integers(0, 71))
def test_truncated_proof_completes_no_exchange(cut):
    whole = Conversation().run()
    answerer = proof.ProofExchange(proof.server_steps(KEY, bytes([1]) * 32))
    answerer.feed(whole["asker"][:cut])

    assert not answerer.is_complete


@given(nonce=nonces.filter(lambda nonce: nonce not in RECORDED))
def test_replayed_proof_is_refused_for_another_nonce(nonce):
    recorded = Conversation().run()
    answerer = proof.ProofExchange(proof.server_steps(KEY, nonce))
    asker = proof.ProofExchange(proof.client_steps(KEY, nonce))

    with pytest.raises(errors.RemoteProtocolError, match="another cluster token"):
        answerer.feed(recorded["asker"])
    with pytest.raises(errors.RemoteProtocolError, match="another cluster token"):
        asker.feed(recorded["answerer"])


def test_caller_refuses_its_own_proof_sent_back():
    asker = proof.ProofExchange(proof.client_steps(KEY, bytes(32)))
    own_proof = asker.feed(asker.first_output)

    with pytest.raises(errors.RemoteProtocolError, match="another cluster token"):
        asker.feed(own_proof)


def test_server_cannot_be_used_to_forge_a_callers_proof():
    """A stranger opens two connections and hands each what the other says."""
    first = proof.ProofExchange(proof.server_steps(KEY, bytes([1]) * 32))
    second = proof.ProofExchange(proof.server_steps(KEY, bytes([2]) * 32))
    challenge = first.feed(proof.GREETING + bytes(32))
    second.feed(challenge)

    with pytest.raises(errors.RemoteProtocolError):
        first.feed(bytes(32))
    assert not second.is_complete


def test_proof_for_another_purpose_is_refused():
    of_requests, of_transfers = (
        proof.derive_key(b"token", what) for what in ("requests", "transfer")
    )

    with pytest.raises(errors.RemoteProtocolError, match="another cluster token"):
        Conversation(of_requests, of_transfers).run()


def test_bytes_after_the_proof_are_kept():
    whole = Conversation().run()
    answerer = proof.ProofExchange(proof.server_steps(KEY, bytes([1]) * 32))
    answerer.feed(whole["asker"] + b"Hello")

    assert (answerer.is_complete, answerer.remainder) == (True, b"Hello")


def test_keys_are_derived_as_in_rfc_5869():
    """Extract, then the first block of expand."""
    secret = hmac.new(b"pydynamo cluster token", b"token", hashlib.sha256).digest()
    expected = hmac.new(secret, b"transfer\x01", hashlib.sha256).digest()

    assert proof.derive_key(b"token", "transfer") == expected


def test_peer_without_a_greeting_is_reported_as_having_no_token():
    answerer = proof.ProofExchange(proof.server_steps(KEY, bytes(32)))

    with pytest.raises(errors.RemoteProtocolError, match="has no cluster token"):
        answerer.feed(b"\x00\x00\x00\x10HELLO")


def test_peer_that_speaks_tls_is_not_reported_as_having_no_token():
    answerer = proof.ProofExchange(proof.server_steps(KEY, bytes(32)))

    with pytest.raises(errors.RemoteProtocolError, match="speaks TLS, and we have no certificates"):
        answerer.feed(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
