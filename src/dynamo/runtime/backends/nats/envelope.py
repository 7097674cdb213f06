"""The envelope of a connection's bytes in NATS messages: it shows missing messages and the end of the connection.

NATS keeps the order of a subject, but loses what a server had in memory when it died and what a slow subscriber
did not take. A stream of bytes with a hole would be decoded into wrong tokens. So each side numbers its messages
from 0, and a connection with a missing message is over.

    kind (u8: 0 open, 1 bytes, 2 close, 3 probe) · number (u64, big-endian) · bytes

A probe is empty and has no number of its own: the server answers it where the subject has no subscriber.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

from dynamo.base import errors

HEADER = struct.Struct(">BQ")


class Kind(IntEnum):
    """The meaning of a message to its connection."""

    OPEN = 0
    BYTES = 1
    CLOSE = 2
    PROBE = 3


PROBE = HEADER.pack(Kind.PROBE, 0)


class Writer:
    """Numbers the messages of one side."""

    def __init__(self) -> None:
        self._next = 0

    def wrap(self, kind: Kind, data: bytes | memoryview = b"") -> bytes:
        """Return one message with the next number."""
        number, self._next = self._next, self._next + 1
        return HEADER.pack(kind, number) + data

    def split(self, data: bytes, max_message_bytes: int) -> Iterator[bytes]:
        """Yield the data as messages of at most `max_message_bytes`."""
        room = max_message_bytes - HEADER.size
        if len(data) <= room:
            yield self.wrap(Kind.BYTES, data)
            return
        view = memoryview(data)
        for start in range(0, len(data), room):
            yield self.wrap(Kind.BYTES, view[start : start + room])


class Reader:
    """Checks the messages that one side receives."""

    def __init__(self) -> None:
        self._next = 0

    def unwrap(self, message: bytes) -> tuple[Kind, bytes]:
        """Return kind and data. Raises RemoteProtocolError if it is not the next message of this connection."""
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
    """Return kind and number of a message. Raises RemoteProtocolError."""
    try:
        kind, number = HEADER.unpack_from(message)
        return Kind(kind), number
    except (struct.error, ValueError) as error:
        raise errors.RemoteProtocolError(f"expected a message of a link: {error}") from error
