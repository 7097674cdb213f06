"""The messages of two agents on a connection: a length (4 bytes), then msgpack; bytes of blocks follow bare.

    server                          client
                                    (first both prove that they are of one cluster: `handshake`)
                            ◀──     AgentHello(its name, the epoch it expects)
    AgentWelcome(padding)   ──▶     longer than a packet: a path that drops long ones is no path for blocks
                            ◀──     Attach                      shared memory: the answer brings a descriptor
                            ◀──     Read(pieces)                bytes follow the answer (and their checksum)
                            ◀──     Write(pieces), bytes (and their checksum)
                            ◀──     Notify
    Done or Refused         ──▶     to each; then the next

One operation at a time per connection; a client may open several. Pieces are pairs of 64-bit offset and length in the
server's pool. Where bytes leave the machine, xxh3 over all bytes of the operation follows them: TCP's own 16 bits
let one damaged segment in 65,536 pass. On loopback they do not leave memory, and nothing follows.

In NIXL's notifications they are other messages, as msgpack; NIXL adds the sender.

    client                              server
    Hello(name, contact)        ──▶                 `contact` is the address for answers, in NIXL's form
                                ◀──     Welcome
    Notify(number, message)     ──▶
                                ◀──     Heard(number) or Refused(number, reason)
    Bye                         ──▶

A notification of NIXL's may be lost with its connection, without an error; hence the answers.
"""  # decider

import array
import sys
from collections.abc import Sequence

import msgspec

from dynamo.base import errors
from dynamo.protocols import wire

MAX_GREETING_BYTES = 1024
MAX_PADDING_BYTES = 16 * 1024  # more than a jumbo frame
MAX_PIECES = 16_384  # per operation; a longer transfer is several
MAX_NOTIFICATION_BYTES = 64 * 1024
MAX_FRAME_BYTES = 16 * MAX_PIECES + 1024
CHECKSUM_BYTES = 8


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    epoch: str
    padding_bytes: int = 0  # that the answer is to have, up to MAX_PADDING_BYTES


class AgentWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    padding: bytes = b""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    pass


class Read(msgspec.Struct, frozen=True, tag="read"):
    pieces: bytes
    is_summed: bool
    timeout_s: float


class Write(msgspec.Struct, frozen=True, tag="write"):
    pieces: bytes
    is_summed: bool
    timeout_s: float


class Notify(msgspec.Struct, frozen=True, tag="notify"):
    message: bytes
    timeout_s: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


REQUESTS = (Attach, Read, Write, Notify)
Span = tuple[int, int]
"""Offset and length."""


def pack(spans: Sequence[Span]) -> bytes:
    """Encode spans as little-endian 64-bit numbers."""
    numbers = array.array("Q", [number for span in spans for number in span])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack(body: bytes, num_bytes: int) -> list[Span]:
    """Decode spans. Raises RemoteProtocolError unless each lies within a pool of `num_bytes`."""
    if not body or len(body) % 16 or len(body) > 16 * MAX_PIECES:
        raise errors.RemoteProtocolError(
            f"expected 1 to {MAX_PIECES} pieces of 16 bytes, got {len(body)} bytes"
        )
    numbers = array.array("Q", body)
    if sys.byteorder == "big":
        numbers.byteswap()
    spans = list(zip(numbers[::2], numbers[1::2], strict=True))
    for offset, length in spans:
        if not length or offset + length > num_bytes:
            raise errors.RemoteProtocolError(
                f"bytes {offset} to {offset + length} are not within a pool of {num_bytes}"
            )
    return spans


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
MAX_BYTES = MAX_NOTIFICATION_BYTES + 1024


class Address(msgspec.Struct, frozen=True):
    """The address of an agent's pool."""

    contact: bytes  # where to connect, and the keys of the registered memory, in NIXL's own form
    pool_at: int  # where the pool begins in the memory of its process


def encode(message: NixlMessage | Address) -> bytes:
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
