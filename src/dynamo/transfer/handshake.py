"""Two processes of one cluster prove to each other that they know its token, without saying it.

Each side makes a nonce, and proves by HMAC-SHA256 over a label of its role, both nonces and the server's epoch (the
scheme of SCRAM and of Python's own `multiprocessing.connection`, which proves both ways too). The nonces make a
recorded proof worthless, the label a reflected one. What follows is neither hidden nor signed: against someone who
can alter packets on the way, use a network that is yours, or a tunnel.

Without a token the same words are said with an empty key: they then prove nothing, and `backends.tcp` stays on
loopback.
"""

import hmac
import secrets

from dynamo.base import errors
from dynamo.transfer import messages
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link


def prove(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes, epoch: str) -> bytes:
    """32 bytes. Nonces are of equal length, so there is one way only to read what is signed."""
    said = b"|".join((b"dynamo-transfer-1", role, server_nonce + client_nonce, epoch.encode()))
    return hmac.digest(token, said, "sha256")


def enter(link: Link, *, name: str, epoch: str, token: bytes, limit: Limit) -> None:
    """The client's side. Raises TransferError if the server is not who we expect, or does not want us."""
    challenge = link.receive(messages.Challenge, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    _check_nonce(challenge.nonce)
    nonce = secrets.token_bytes(messages.NONCE_BYTES)
    proof = prove(token, b"client", challenge.nonce, nonce, epoch)
    link.send(messages.Hello(name, epoch, nonce, proof), limit)
    welcome = link.receive(messages.Welcome, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    expected = prove(token, b"server", challenge.nonce, nonce, epoch)
    if not hmac.compare_digest(welcome.proof, expected):
        raise errors.TransferError(
            "the peer does not know our cluster token; give every worker the same"
        )


def admit(link: Link, *, epoch: str, token: bytes, limit: Limit) -> str:
    """The server's side; gives the name that the client claims. Raises RemoteProtocolError, after telling it why."""
    nonce = secrets.token_bytes(messages.NONCE_BYTES)
    link.send(messages.Challenge(nonce), limit)
    hello = link.receive(messages.Hello, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    _check_nonce(hello.nonce)
    expected = prove(token, b"client", nonce, hello.nonce, hello.epoch)
    if not hmac.compare_digest(hello.proof, expected):
        raise errors.RemoteProtocolError("wrong cluster token; give every worker the same")
    if hello.epoch != epoch:
        raise errors.RemoteProtocolError(
            "the worker has restarted since it gave out its metadata; ask for its new one"
        )
    link.send(messages.Welcome(prove(token, b"server", nonce, hello.nonce, epoch)), limit)
    return hello.name


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != messages.NONCE_BYTES:
        raise errors.RemoteProtocolError(
            f"expected a nonce of {messages.NONCE_BYTES} bytes, got {len(nonce)}"
        )
