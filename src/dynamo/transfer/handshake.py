"""Two agents prove to each other that they know the cluster's token (`base.proof`), and that they mean each other.

What follows is neither hidden nor signed, unless the link speaks TLS. Without a token the same words are said with an
empty key: they then prove nothing, and `backends.tcp` stays on loopback.
"""

import secrets

from dynamo.base import errors, proof
from dynamo.transfer import messages
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link

PURPOSE = "transfer"


def enter(link: Link, *, name: str, epoch: str, key: bytes, limit: Limit) -> None:
    """The client's side. Raises TransferError if the server is not who we expect, or does not want us."""
    link.secure(limit)
    try:
        _exchange(link, proof.ask(key, _nonce()), limit)
    except errors.RemoteProtocolError as error:
        raise errors.TransferError(f"the peer {error}") from error
    link.send(messages.Hello(name, epoch), limit)
    link.receive(messages.Welcome, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)


def admit(link: Link, *, key: bytes, limit: Limit) -> None:
    """The server's side: one of us is at the other end. Raises RemoteProtocolError, TransferError."""
    link.secure(limit)
    _exchange(link, proof.answer(key, _nonce()), limit)


def welcome(link: Link, *, epoch: str, limit: Limit) -> str:
    """Whom the admitted client expects; gives the name that it claims. Raises RemoteProtocolError."""
    hello = link.receive(messages.Hello, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    if hello.epoch != epoch:
        raise errors.RemoteProtocolError(
            "the worker has restarted since it gave out its metadata; ask for its new one"
        )
    link.send(messages.Welcome(), limit)
    return hello.name


def _exchange(link: Link, steps: proof.Steps, limit: Limit) -> None:
    step = next(steps)
    link.send_bytes(step.said, limit)
    while step.num_wanted:
        step = steps.send(link.receive_bytes(step.num_wanted, limit))
        link.send_bytes(step.said, limit)


def _nonce() -> bytes:
    return secrets.token_bytes(proof.NONCE_BYTES)
