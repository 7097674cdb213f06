"""What two agents say to each other in NIXL's notifications, as msgpack; NIXL says who sent it.

    client                              server
    Hello(name, contact)        ──▶                 `contact` is NIXL's word for where to answer
                                ◀──     Welcome
    Notify(number, message)     ──▶
                                ◀──     Heard(number) or Refused(number, reason)
    Bye                         ──▶

A notification of NIXL's may be lost with its connection, and nobody is told; hence the answers.
"""

import msgspec

from dynamo.base import errors
from dynamo.transfer import messages


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    contact: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    pass


class Notify(msgspec.Struct, frozen=True, tag="notify"):
    number: int
    message: bytes
    timeout_s: float


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    number: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    number: int
    reason: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    pass


Word = Hello | Welcome | Notify | Heard | Refused | Bye
MAX_WORD_BYTES = messages.MAX_NOTIFICATION_BYTES + 1024


class Address(msgspec.Struct, frozen=True):
    """Of an agent's pool."""

    contact: bytes  # where to connect, and the keys of the registered memory, in NIXL's own form
    pool_at: int  # where the pool begins in the memory of its process


def encode(word: Word | Address) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(word)


def decode(said: bytes) -> Word:
    """Raises RemoteProtocolError for anything else."""
    if len(said) > MAX_WORD_BYTES:
        raise errors.RemoteProtocolError(
            f"expected at most {MAX_WORD_BYTES} bytes in a notification, got {len(said)}"
        )
    try:
        word: Word = msgspec.msgpack.decode(said, type=Word)
    except msgspec.DecodeError as error:
        raise errors.RemoteProtocolError(f"expected a word of a peer of ours: {error}") from error
    return word


def decode_address(body: bytes) -> Address:
    """Raises TransferError for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=Address)
    except msgspec.DecodeError as error:
        raise errors.TransferError(f"expected NIXL's address of a worker: {error}") from error
