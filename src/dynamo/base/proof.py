"""Two processes of one cluster prove to each other that they know its token, without saying it: the steps alone.

    asker                                answerer
    GREETING, nonce              ──▶
                                 ◀──     GREETING, nonce
    proof as asker               ──▶
                                 ◀──     proof as answerer

A proof is HMAC-SHA256 over the role and both nonces (the scheme of SCRAM, RFC 5802, and of Python's own
`multiprocessing.connection`): fresh nonces make a recorded proof worthless, the role a reflected one. The answerer
proves nothing to who has not. All parts have a fixed length and are compared, never parsed: a stranger can make us
hold 32 bytes.

What follows on the connection is neither hidden nor signed: that is TLS's work.

Steps are generators, so that blocking sockets and event loops drive the same ones: they yield what to send and how
many bytes they want next, and want none when all is proven.
"""

import hmac
from collections.abc import Generator
from typing import NamedTuple

from dynamo.base import errors

GREETING = b"dynprov1"  # as the length of a frame it would be more than any may have
NONCE_BYTES = 32
PROOF_BYTES = 32


class Step(NamedTuple):
    """What to send now, and how many bytes to wait for; 0: both have proven it."""

    said: bytes
    num_wanted: int


Steps = Generator[Step, bytes, None]


def derive(token: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose only (HKDF, RFC 5869): what is proven for one is worthless for another."""
    secret = hmac.digest(b"pydynamo cluster token", token, "sha256")
    return hmac.digest(secret, purpose.encode() + b"\x01", "sha256")


def prove(key: bytes, role: bytes, asker_nonce: bytes, answerer_nonce: bytes) -> bytes:
    """32 bytes. The nonces have a fixed length, so there is one way only to read what is signed."""
    return hmac.digest(key, role + b"|" + asker_nonce + answerer_nonce, "sha256")


def ask(key: bytes, nonce: bytes) -> Steps:
    """The side that connects; `nonce` is random, and new for each connection. Raises RemoteProtocolError."""
    _check_greeting((yield Step(GREETING + nonce, len(GREETING))))
    theirs = yield Step(b"", NONCE_BYTES)
    proof = yield Step(prove(key, b"asker", nonce, theirs), PROOF_BYTES)
    _check(proof, prove(key, b"answerer", nonce, theirs))
    yield Step(b"", 0)


def answer(key: bytes, nonce: bytes) -> Steps:
    """The side that listens; `nonce` as for `ask`. Raises RemoteProtocolError."""
    _check_greeting((yield Step(b"", len(GREETING))))
    theirs = yield Step(b"", NONCE_BYTES)
    proof = yield Step(GREETING + nonce, PROOF_BYTES)
    _check(proof, prove(key, b"asker", theirs, nonce))
    yield Step(prove(key, b"answerer", theirs, nonce), 0)


class Exchange:
    """Steps that are fed with bytes as they come, in whatever portions."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._step = next(steps)
        self._held = b""

    @property
    def first_words(self) -> bytes:
        """To be sent before anything came."""
        return self._step.said

    @property
    def is_over(self) -> bool:
        """Has the peer proven it?"""
        return not self._step.num_wanted

    @property
    def rest(self) -> bytes:
        """What came behind the peer's proof."""
        return self._held

    def feed(self, data: bytes) -> bytes:
        """What to send now. Raises RemoteProtocolError if the peer does not know the token."""
        self._held += data
        said = b""
        while not self.is_over and len(self._held) >= self._step.num_wanted:
            part, self._held = (
                self._held[: self._step.num_wanted],
                self._held[self._step.num_wanted :],
            )
            self._step = self._steps.send(part)
            said += self._step.said
        return said


def _check_greeting(said: bytes) -> None:
    if said != GREETING:
        raise errors.RemoteProtocolError(
            "has no cluster token; give every process the same (--cluster-token-file)"
        )


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise errors.RemoteProtocolError(
            "has another cluster token; give every process the same (--cluster-token-file)"
        )
