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
"""

import array
import sys
from collections.abc import Sequence

import msgspec

from dynamo.base import errors

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
