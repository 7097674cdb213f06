"""The messages of two agents in NIXL's notifications, as msgpack; NIXL adds the sender.

    client                              server
    Hello(name, contact)        ──▶                 `contact` is the address for answers, in NIXL's form
                                ◀──     Welcome
    Notify(number, message)     ──▶
                                ◀──     Heard(number) or Refused(number, reason)
    Bye                         ──▶

A notification of NIXL's may be lost with its connection, without an error; hence the answers.
"""

import msgspec

from dynamo.base import errors
from dynamo.protocols import wire
from dynamo.transfer import messages


class NixlHello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    contact: bytes


class NixlWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


class NixlNotify(msgspec.Struct, frozen=True, tag="notify"):
    number: int
    message: bytes
    timeout_s: float


class NixlHeard(msgspec.Struct, frozen=True, tag="heard"):
    number: int


class NixlRefused(msgspec.Struct, frozen=True, tag="refused"):
    number: int
    reason: str


class NixlBye(msgspec.Struct, frozen=True, tag="bye"):
    pass


NixlMessage = NixlHello | NixlWelcome | NixlNotify | NixlHeard | NixlRefused | NixlBye
MAX_BYTES = messages.MAX_NOTIFICATION_BYTES + 1024


class Address(msgspec.Struct, frozen=True):
    """The address of an agent's pool."""

    contact: bytes  # where to connect, and the keys of the registered memory, in NIXL's own form
    pool_at: int  # where the pool begins in the memory of its process


def encode(message: NixlMessage | Address) -> bytes:
    """Encode a message or an address as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes) -> NixlMessage:
    """Decode a message. Raises RemoteProtocolError for anything else."""
    if len(body) > MAX_BYTES:
        raise errors.RemoteProtocolError(
            f"expected at most {MAX_BYTES} bytes in a notification, got {len(body)}"
        )
    try:
        message: NixlMessage = msgspec.msgpack.decode(body, type=NixlMessage)
    except wire.DECODE_ERRORS as error:
        raise errors.RemoteProtocolError(
            f"expected a message of a peer of ours: {error}"
        ) from error
    return message


def decode_address(body: bytes) -> Address:
    """Decode an address. Raises TransferError for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=Address)
    except wire.DECODE_ERRORS as error:
        raise errors.TransferError(f"expected NIXL's address of a worker: {error}") from error
