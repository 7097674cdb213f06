"""The proof by which two processes of one cluster show each other that they know its token, without sending it.

    client                                 server
    GREETING, nonce              ──▶
                                 ◀──     GREETING, nonce
    proof as asker               ──▶
                                 ◀──     proof as answerer

A proof is HMAC-SHA256 over the role and both nonces (the scheme of SCRAM, RFC 5802, and of Python's own
`multiprocessing.connection`): fresh nonces make a recorded proof worthless, the role a reflected one. The server
proves nothing to a client that has not proven itself. All parts have a fixed length and are compared, never parsed, so
an unknown peer can make this process hold 32 bytes at most. What follows on the connection is neither hidden nor
signed: that is TLS's work.

The steps of both sides are generators, without any I/O, so that blocking sockets and event loops drive the same ones:
they yield what to send and how many bytes they expect next, and expect none when the peer has proven itself.
"""  # decider

import hmac
from collections.abc import Generator, Iterable
from typing import NamedTuple

from dynamo.base import errors

GREETING = b"dynprov1"  # as the length of a frame it would be more than any may have
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # of TLS, how an alert and a handshake begin
NONCE_BYTES = 32
PROOF_BYTES = 32


class ProofStep(NamedTuple):
    """The bytes to send now, and how many to wait for; 0 when both sides have proven themselves."""

    output: bytes
    num_expected: int


Steps = Generator[ProofStep, bytes, None]


def derive_key(token: bytes, purpose: str) -> bytes:
    """Return a key of 32 bytes for one purpose only (HKDF, RFC 5869): a proof for one is worthless for another."""
    secret = hmac.digest(b"pydynamo cluster token", token, "sha256")
    return hmac.digest(secret, purpose.encode() + b"\x01", "sha256")


def compute_proof(key: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return 32 bytes. The nonces have a fixed length, so what is signed can be read in one way only."""
    return hmac.digest(key, role + b"|" + client_nonce + server_nonce, "sha256")


def client_steps(key: bytes, nonce: bytes) -> Steps:
    """Run the side that connects; `nonce` is random and new for each connection. Raises RemoteProtocolError."""
    _check_greeting((yield ProofStep(GREETING + nonce, len(GREETING))))
    server_nonce = yield ProofStep(b"", NONCE_BYTES)
    proof = yield ProofStep(compute_proof(key, b"asker", nonce, server_nonce), PROOF_BYTES)
    _find_key(proof, (key,), b"answerer", nonce, server_nonce)
    yield ProofStep(b"", 0)


def server_steps(key: bytes, nonce: bytes, *further_keys: bytes) -> Steps:
    """Run the side that listens; it answers with the key that the client has proven. Raises RemoteProtocolError."""
    _check_greeting((yield ProofStep(b"", len(GREETING))))
    client_nonce = yield ProofStep(b"", NONCE_BYTES)
    proof = yield ProofStep(GREETING + nonce, PROOF_BYTES)
    key = _find_key(proof, (key, *further_keys), b"asker", client_nonce, nonce)
    yield ProofStep(compute_proof(key, b"answerer", client_nonce, nonce), 0)


class ProofExchange:
    """The steps of one side, fed with bytes in whatever portions they arrive."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._step = next(steps)
        self._buffer = b""

    @property
    def first_output(self) -> bytes:
        """The bytes to send before anything has come."""
        return self._step.output

    @property
    def is_complete(self) -> bool:
        """True when the peer has proven that it knows the token."""
        return not self._step.num_expected

    @property
    def remainder(self) -> bytes:
        """The bytes that came behind the peer's proof."""
        return self._buffer

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the peer and return what to send now. Raises RemoteProtocolError for another token."""
        self._buffer += data
        output = b""
        while not self.is_complete and len(self._buffer) >= self._step.num_expected:
            size = self._step.num_expected
            part, self._buffer = self._buffer[:size], self._buffer[size:]
            self._step = self._steps.send(part)
            output += self._step.output
        return output


def _check_greeting(greeting: bytes) -> None:
    if greeting.startswith(_TLS_RECORDS):
        raise errors.RemoteProtocolError(
            "speaks TLS, and we have no certificates: give every process its own (--cluster-tls-cert-path)"
        )
    if greeting != GREETING:
        raise errors.RemoteProtocolError(
            "has no cluster token; give every process the same (--cluster-token-file)"
        )


def _find_key(
    proof: bytes, keys: Iterable[bytes], role: bytes, client_nonce: bytes, server_nonce: bytes
) -> bytes:
    """Return the key that this proves. Raises RemoteProtocolError if it is none of them."""
    for key in keys:
        if hmac.compare_digest(proof, compute_proof(key, role, client_nonce, server_nonce)):
            return key
    raise errors.RemoteProtocolError(
        "has another cluster token; give every process the same (--cluster-token-file)"
    )
