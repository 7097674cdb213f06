"""A connected stream socket between two agents, used by one thread at a time, under a limit.

The socket blocks, and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): a socket with Python's own timeout needs a
poll before every call and returns what has come so far, while a blocking one fills a whole list of buffers in one call.
Bytes go straight from and to the pool. They are moved in *bites*: few, because each costs a system call and often a
change of threads, but not so long that the processor's cache has lost them when they are summed. All that belongs
together is sent so that the kernel need not wake the receiver for a part of it (MSG_MORE).
"""

import functools
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar, Union, cast

import msgspec
import xxhash

from dynamo.base import errors
from dynamo.transfer import messages
from dynamo.transfer.limit import Limit

GREETING_LIMIT_S = 5.0
_BITE_BYTES = 2 * 2**20
_BITE_BUFFERS = 512  # the kernel takes 1,024 (IOV_MAX)
_WAKE_BYTES = 256 * 1024  # so many have come before a receiver of more is woken
_LENGTH = struct.Struct("!I")
_TIMEVAL = struct.Struct("ll")
M = TypeVar("M", bound=msgspec.Struct)


class Link:
    """Owns the socket. After any error it is good for nothing but `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def interrupt(self) -> None:
        """Wake whoever waits on it, with an end of file. From any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was not connected any more, so nobody waits
            return

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def secure(self, limit: Limit) -> None:
        """Before the first word: a plain connection has nothing to do. Raises TransferError."""

    def peer_uid(self) -> int:
        """The user at the other end of a unix socket."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("iII", credentials)[1])

    def send_bytes(self, said: bytes, limit: Limit) -> None:
        """Bare. Raises TransferError."""
        if said:
            self._send([memoryview(said)], limit)

    def receive_bytes(self, num_bytes: int, limit: Limit) -> bytes:
        """So many, no more. Raises TransferError."""
        received = bytearray(num_bytes)
        self._receive([memoryview(received)], limit)
        return bytes(received)

    def send(self, message: msgspec.Struct, limit: Limit, *, is_more: bool = False) -> None:
        """`is_more`: bytes follow at once. Raises TransferError."""
        body = msgspec.msgpack.encode(message)
        self._send([memoryview(_LENGTH.pack(len(body)) + body)], limit, is_more=is_more)

    def receive(self, *kinds: type[M], limit: Limit | None, max_bytes: int) -> M:
        """The next message, of one of these kinds; a limit of None waits for as long as the peer is there.

        Raises TransferError: the peer is gone, silent, or refused; RemoteProtocolError if it said something else.
        """
        header = bytearray(_LENGTH.size)
        self._receive([memoryview(header)], limit)
        (length,) = _LENGTH.unpack(header)
        if length > max_bytes:
            raise errors.RemoteProtocolError(
                f"expected a message of at most {max_bytes} bytes, got one of {length}"
            )
        body = bytearray(length)
        self._receive([memoryview(body)], limit or Limit(GREETING_LIMIT_S))
        return _decode(bytes(body), kinds)

    def send_spans(
        self, memory: memoryview, spans: Sequence[messages.Span], limit: Limit, *, is_summed: bool
    ) -> None:
        """These bytes, then their checksum if wanted. Raises TransferError."""
        checksum = xxhash.xxh3_64()
        for bite in _bites(memory, spans):
            if is_summed:
                _add(checksum, bite)
            self._send(bite, limit, is_more=is_summed)
        if is_summed:
            self._send([memoryview(checksum.digest())], limit)

    def receive_spans(
        self, memory: memoryview, spans: Sequence[messages.Span], limit: Limit, *, is_summed: bool
    ) -> None:
        """Fill these bytes. Raises TransferError, also if their checksum is wrong."""
        checksum = xxhash.xxh3_64()
        num_left = sum(length for _, length in spans)
        if num_left > _WAKE_BYTES:
            self._wake_after(_WAKE_BYTES)
        for bite in _bites(memory, spans, num_last=_WAKE_BYTES):
            if num_left == _WAKE_BYTES:
                self._wake_after(1)  # more than are on their way would never come
            self._receive(bite, limit)
            num_left -= sum(map(len, bite))
            if is_summed:
                _add(checksum, bite)
        if not is_summed:
            return
        sent = bytearray(messages.CHECKSUM_BYTES)
        self._receive([memoryview(sent)], limit)
        if sent != checksum.digest():
            raise errors.TransferError("bytes were damaged on their way: the checksum is wrong")

    def send_descriptor(self, fd: int, limit: Limit) -> None:
        """Over a unix socket. Raises TransferError."""
        limit.remaining_s()
        try:
            socket.send_fds(self._sock, [b"\0"], [fd])
        except OSError as error:
            raise lost(error) from error

    def receive_descriptor(self, limit: Limit) -> int:
        """Ours to close. Raises TransferError."""
        self._allow(limit, socket.SO_RCVTIMEO)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise lost(error) from error
        if not descriptors:
            raise errors.TransferError("the peer did not send its memory's descriptor")
        return descriptors[0]

    def _send(self, buffers: list[memoryview], limit: Limit, *, is_more: bool = False) -> None:
        flags = socket.MSG_MORE if is_more else 0
        while buffers:
            self._allow(limit, socket.SO_SNDTIMEO)
            try:
                num_sent = self._sock.sendmsg(buffers, (), flags)
            except BlockingIOError:
                continue  # its time is over: _allow says so
            except OSError as error:
                raise lost(error) from error
            buffers = _rest(buffers, num_sent)

    def _receive(self, buffers: list[memoryview], limit: Limit | None) -> None:
        while buffers:
            self._allow(limit, socket.SO_RCVTIMEO)
            try:
                num_received = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise lost(error) from error
            if not num_received:
                raise errors.TransferError("the peer closed the connection")
            buffers = _rest(buffers, num_received)

    def _wake_after(self, num_bytes: int) -> None:
        """Let the kernel collect so many before it wakes us: on one host each waking is a change of threads."""
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        except OSError as error:
            raise lost(error) from error

    def _allow(self, limit: Limit | None, option: int) -> None:
        """Let the next call wait as long as the limit says, at least a millisecond: 0 would be for ever."""
        remaining_s = 0.0 if limit is None else max(limit.remaining_s(), 0.001)
        seconds = int(remaining_s)
        timeval = _TIMEVAL.pack(seconds, int((remaining_s - seconds) * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        except OSError as error:
            raise lost(error) from error


def _decode(body: bytes, kinds: tuple[type[M], ...]) -> M:
    try:
        message = _decoder(kinds).decode(body)
    except msgspec.DecodeError as error:
        raise errors.RemoteProtocolError(f"expected another message: {error}") from error
    if isinstance(message, messages.Refused):
        raise errors.TransferError(f"the peer refused: {message.reason}")
    return cast("M", message)


@functools.cache
def _decoder(kinds: tuple[type[M], ...]) -> msgspec.msgpack.Decoder[M | messages.Refused]:
    return msgspec.msgpack.Decoder(Union[*kinds, messages.Refused])


def _bites(
    memory: memoryview, spans: Sequence[messages.Span], *, num_last: int = 0
) -> Iterator[list[memoryview]]:
    """The bytes of all spans, in order, in lists that are short enough for one call.

    One list begins where `num_last` bytes are left, if there are more.
    """
    bite: list[memoryview] = []
    num_left = sum(length for _, length in spans)
    room = _room(num_left, num_last)
    for offset, length in spans:
        end = offset + length
        while offset < end:
            part = memory[offset : min(end, offset + room)]
            bite.append(part)
            offset += len(part)
            num_left -= len(part)
            room -= len(part)
            if not room or len(bite) == _BITE_BUFFERS:
                yield bite
                bite, room = [], _room(num_left, num_last)
    if bite:
        yield bite


def _room(num_left: int, num_last: int) -> int:
    return min(_BITE_BYTES, num_left - num_last if num_left > num_last else num_left)


def _add(checksum: xxhash.xxh3_64, bite: list[memoryview]) -> None:
    for part in bite:
        checksum.update(part)


def _rest(buffers: list[memoryview], num_done: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    for i, buffer in enumerate(buffers):
        if num_done < len(buffer):
            return [buffer[num_done:], *buffers[i + 1 :]]
        num_done -= len(buffer)
    return []


def lost(error: OSError) -> errors.TransferError:
    """What to raise for it."""
    return errors.TransferError(f"the connection to the peer broke: {error}")
