"""What stands around the bytes of a link when NATS carries them: whether a message is missing, and where the link ends.

NATS keeps the order of a subject, but loses what a server had in memory when it died and what a slow subscriber
did not take. A stream of bytes with a hole would be decoded into wrong tokens. So each side numbers its messages
from 0, and a link of which one is missing is over.

    kind (u8: 0 open, 1 bytes, 2 close, 3 probe) · number (u64, big-endian) · bytes

A probe says nothing and has no number of its own: it is there for the server, who answers it where nobody hears.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

from dynamo.base import errors

HEADER = struct.Struct(">BQ")


class Kind(IntEnum):
    """What a message means to its link."""

    OPEN = 0
    BYTES = 1
    CLOSE = 2
    PROBE = 3


PROBE = HEADER.pack(Kind.PROBE, 0)


class Writer:
    """Numbers what one side says."""

    def __init__(self) -> None:
        self._next = 0

    def wrap(self, kind: Kind, data: bytes | memoryview = b"") -> bytes:
        """One message."""
        number, self._next = self._next, self._next + 1
        return HEADER.pack(kind, number) + data

    def split(self, data: bytes, max_message_bytes: int) -> Iterator[bytes]:
        """As many messages as a server needs that takes none longer than this."""
        room = max_message_bytes - HEADER.size
        if len(data) <= room:
            yield self.wrap(Kind.BYTES, data)
            return
        view = memoryview(data)
        for start in range(0, len(data), room):
            yield self.wrap(Kind.BYTES, view[start : start + room])


class Reader:
    """Checks what one side hears."""

    def __init__(self) -> None:
        self._next = 0

    def unwrap(self, message: bytes) -> tuple[Kind, bytes]:
        """Raises RemoteProtocolError if it is not the next message of this link."""
        kind, number = header(message)
        if kind is Kind.PROBE:
            return kind, b""
        if number != self._next:
            raise errors.RemoteProtocolError(
                f"NATS lost a message: expected number {self._next}, got {number}"
            )
        self._next += 1
        return kind, message[HEADER.size :]


def header(message: bytes) -> tuple[Kind, int]:
    """Kind and number. Raises RemoteProtocolError."""
    try:
        kind, number = HEADER.unpack_from(message)
        return Kind(kind), number
    except (struct.error, ValueError) as error:
        raise errors.RemoteProtocolError(f"expected a message of a link: {error}") from error
