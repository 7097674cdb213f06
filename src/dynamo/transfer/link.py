"""Links: connected stream sockets between two agents, plain or with TLS.

A link is used by one thread at a time, under a time limit.

The socket blocks, and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): a socket with Python's own timeout needs a
poll before every call and returns what has come so far, while a blocking one fills a whole list of buffers in one call.
Bytes go straight from and to the pool. They are moved in *bites*: few, because each costs a system call and often a
change of threads, but not so long that the processor's cache has lost them when they are summed. All that belongs
together is sent so that the kernel need not wake the receiver for a part of it (MSG_MORE).

A link begins with a handshake: each end proves that it knows the cluster's token (`runtime.authentication`), then the
client names its server. Without a token the same steps run with an empty key: they then prove nothing, and
`backends.tcp` stays on loopback. Without TLS what follows is neither encrypted nor signed.
"""

import functools
import select
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar, Union, cast

import msgspec
import xxhash

from dynamo.base import errors, local_users, membership
from dynamo.protocols import wire
from dynamo.runtime import authentication
from dynamo.transfer import messages
from dynamo.transfer.api import TimeLimit

GREETING_LIMIT_S = 5.0
# A copy of which no byte has come for so long, or a link that was not opened, is given up: the peer's host is silent,
# or a router drops long packets in silence. The sender keeps only the time limit, because the kernel takes its bytes by
# the megabyte.
STALL_S = 2.0
_WAITS_OF_STALL = 8  # a wait that brings some bytes and then none does not say when these came
_BITE_BYTES = 2 * 2**20
_BITE_BUFFERS = 512  # the kernel takes 1,024 (IOV_MAX)
_WAKE_BYTES = 256 * 1024  # so many have come before a receiver of more is woken
_LENGTH = struct.Struct("!I")
_TIMEVAL = struct.Struct("ll")
M = TypeVar("M", bound=msgspec.Struct)


class Link:
    """A link over a plain socket, which it owns. After any error only `close` may be called."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def interrupt(self) -> None:
        """Wake the thread that waits on the link, with an end of file. From any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was not connected any more, so no thread waits
            return

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()

    def has_ended(self) -> bool:
        """Return whether the peer has closed a link on which it owes nothing; bytes that it sends then are its end."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def secure(self, limit: TimeLimit) -> None:
        """Encrypt the link before the first message; nothing to do without TLS. Raises TransferError."""

    def peer_uid(self) -> int:
        """Return the user id at the other end of a unix socket."""
        return local_users.peer_uid(self._sock)

    def send_bytes(self, body: bytes, limit: TimeLimit) -> None:
        """Send bytes without a length. Raises TransferError."""
        if body:
            self._send([memoryview(body)], limit)

    def receive_bytes(self, num_bytes: int, limit: TimeLimit) -> bytes:
        """Receive exactly `num_bytes`. Raises TransferError."""
        received = bytearray(num_bytes)
        self._receive([memoryview(received)], limit)
        return bytes(received)

    def send(self, message: msgspec.Struct, limit: TimeLimit, *, is_more: bool = False) -> None:
        """Send a message; `is_more` if bytes follow at once. Raises TransferError."""
        body = msgspec.msgpack.encode(message)
        self._send([memoryview(_LENGTH.pack(len(body)) + body)], limit, is_more=is_more)

    def receive(
        self, *kinds: type[M], limit: TimeLimit | None, max_bytes: int, is_copy: bool = False
    ) -> M:
        """Receive the next message, of one of these kinds; a limit of None waits as long as the peer is connected.

        `is_copy`: the message begins a copy, and is given up as one that stalls (`STALL_S`).

        Raises TransferError: the peer is gone, silent, or refused; RemoteProtocolError for any other message.
        """
        header = bytearray(_LENGTH.size)
        self._receive([memoryview(header)], limit, is_copy=is_copy)
        (length,) = _LENGTH.unpack(header)
        if length > max_bytes:
            raise errors.RemoteProtocolError(
                f"expected a message of at most {max_bytes} bytes, got one of {length}"
            )
        body = bytearray(length)
        self._receive([memoryview(body)], limit or TimeLimit(GREETING_LIMIT_S))
        try:
            message = _decoder(kinds).decode(bytes(body))
        except wire.DECODE_ERRORS as error:
            raise errors.RemoteProtocolError(f"expected another message: {error}") from error
        if isinstance(message, messages.Refused):
            raise errors.TransferError(f"the peer refused: {message.reason}")
        return cast("M", message)

    def send_spans(
        self,
        memory: memoryview,
        spans: Sequence[messages.Span],
        limit: TimeLimit,
        *,
        is_summed: bool,
    ) -> None:
        """Send the bytes of these spans, then their checksum if `is_summed`. Raises TransferError."""
        checksum = xxhash.xxh3_64()
        for bite in _bites(memory, spans):
            if is_summed:
                _add(checksum, bite)
            self._send(bite, limit, is_more=is_summed)
        if is_summed:
            self._send([memoryview(checksum.digest())], limit)

    def receive_spans(
        self,
        memory: memoryview,
        spans: Sequence[messages.Span],
        limit: TimeLimit,
        *,
        is_summed: bool,
    ) -> None:
        """Receive the bytes of these spans. Raises TransferError, also if it stalls or the checksum is wrong."""
        checksum = xxhash.xxh3_64()
        num_left = sum(length for _, length in spans)
        if num_left > _WAKE_BYTES:
            self._wake_after(_WAKE_BYTES)
        for bite in _bites(memory, spans, num_last=_WAKE_BYTES):
            if num_left == _WAKE_BYTES:
                self._wake_after(1)  # more than are on their way would never come
            self._receive(bite, limit, is_copy=True)
            num_left -= sum(map(len, bite))
            if is_summed:
                _add(checksum, bite)
        if not is_summed:
            return
        remote_digest = bytearray(messages.CHECKSUM_BYTES)
        self._receive([memoryview(remote_digest)], limit, is_copy=True)
        if remote_digest != checksum.digest():
            raise errors.TransferError("bytes were damaged on their way: the checksum is wrong")

    def send_descriptor(self, fd: int, limit: TimeLimit) -> None:
        """Send a file descriptor over a unix socket. Raises TransferError."""
        limit.remaining_s()
        try:
            socket.send_fds(self._sock, [b"\0"], [fd])
        except OSError as error:
            raise lost(error) from error

    def receive_descriptor(self, limit: TimeLimit) -> int:
        """Receive a file descriptor, which the caller has to close. Raises TransferError."""
        self._set_timeout(limit.remaining_s(), socket.SO_RCVTIMEO)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise lost(error) from error
        if not descriptors:
            raise errors.TransferError("the peer did not send its memory's descriptor")
        return descriptors[0]

    def _send(self, buffers: list[memoryview], limit: TimeLimit, *, is_more: bool = False) -> None:
        flags = getattr(socket, "MSG_MORE", 0) if is_more else 0  # only Linux has it
        while buffers:
            self._set_timeout(limit.remaining_s(), socket.SO_SNDTIMEO)
            try:
                num_sent = self._sock.sendmsg(buffers, (), flags)
            except BlockingIOError:
                continue  # at the time limit, remaining_s raises
            except OSError as error:
                raise lost(error) from error
            buffers = _rest(buffers, num_sent)

    def _receive(
        self, buffers: list[memoryview], limit: TimeLimit | None, *, is_copy: bool = False
    ) -> None:
        num_silent = 0
        while buffers:
            timeout_s = _receive_timeout(limit, num_silent, is_copy=is_copy)
            self._set_timeout(timeout_s, socket.SO_RCVTIMEO)
            try:
                num_received = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                num_silent += 1
                continue
            except OSError as error:
                raise lost(error) from error
            if not num_received:
                raise errors.TransferError("the peer closed the connection")
            num_silent = 0
            buffers = _rest(buffers, num_received)

    def _wake_after(self, num_bytes: int) -> None:
        """Let the kernel collect `num_bytes` before it wakes us: on one host each wake-up is a change of threads."""
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        except OSError as error:
            raise lost(error) from error

    def _set_timeout(self, timeout_s: float | None, option: int) -> None:
        """Set the timeout of the next call, at least a millisecond: 0 would be for ever, as None is."""
        timeout_s = 0.0 if timeout_s is None else max(timeout_s, 0.001)
        seconds = int(timeout_s)
        timeval = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        except OSError as error:
            raise lost(error) from error


class TlsLink(Link):
    """A link over TLS; `secure` comes first.

    Encryption costs a copy and the time of AES; its bytes need no checksum of ours. OpenSSL takes one buffer at a time,
    and a socket with Python's own timeout: one of the kernel's would look to it like a call to be repeated for ever.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Raises OSError if the connection is gone already."""
        super().__init__(sock)
        self._tls = context.wrap_socket(
            sock, server_side=is_server, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self._sock = self._tls

    def interrupt(self) -> None:
        """Wake the waiting thread below TLS: the shutdown of TLS is not for other threads."""
        try:
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)
        except OSError:  # it was not connected any more, so no thread waits
            return

    def secure(self, limit: TimeLimit) -> None:
        has_ended = False
        while not has_ended:
            self._tls.settimeout(limit.remaining_s())
            try:
                self._tls.do_handshake()
                has_ended = True
            except TimeoutError:
                continue  # at the time limit, remaining_s raises
            except OSError as error:
                reason = authentication.describe_tls_failure(error)
                raise errors.TransferError(f"the peer {reason}") from error

    def _send(self, buffers: list[memoryview], limit: TimeLimit, *, is_more: bool = False) -> None:
        for buffer in buffers:
            remaining = buffer
            while remaining:
                self._tls.settimeout(limit.remaining_s())
                try:
                    remaining = remaining[self._tls.send(remaining) :]
                except TimeoutError:
                    continue  # at the time limit, remaining_s raises
                except OSError as error:
                    raise lost(self._find_alert() or error) from error

    def _find_alert(self) -> ssl.SSLError | None:
        """Return why the peer has closed, if it said so: its alert waits to be read."""
        self._tls.settimeout(0)
        try:
            self._tls.recv(1)
        except (ssl.SSLEOFError, ssl.SSLWantReadError):
            return None
        except ssl.SSLError as alert:
            return alert
        except OSError:
            return None
        return None

    def _receive(
        self, buffers: list[memoryview], limit: TimeLimit | None, *, is_copy: bool = False
    ) -> None:
        num_silent = 0
        for buffer in buffers:
            remaining = buffer
            while remaining:
                self._tls.settimeout(_receive_timeout(limit, num_silent, is_copy=is_copy))
                try:
                    num_received = self._tls.recv_into(remaining)
                except TimeoutError:
                    num_silent += 1
                    continue
                except OSError as error:
                    raise lost(error) from error
                if not num_received:
                    raise errors.TransferError("the peer closed the connection")
                num_silent = 0
                remaining = remaining[num_received:]

    def _wake_after(self, num_bytes: int) -> None:
        """Do nothing: OpenSSL may hold some of the bytes already, so that the kernel would wait in vain."""


def _receive_timeout(limit: TimeLimit | None, num_silent: int, *, is_copy: bool) -> float | None:
    """Return how long the next call may wait; None: for ever. Raises TransferError after too many silent waits."""
    if limit is None or not is_copy:
        return None if limit is None else limit.remaining_s()
    if num_silent >= _WAITS_OF_STALL:
        raise errors.TransferError(f"no byte of the copy has come for {STALL_S:g} s")
    return min(limit.remaining_s(), STALL_S / _WAITS_OF_STALL)


def new_authenticator(
    credentials: membership.Credentials,
) -> authentication.ConnectionAuthenticator:
    """Return the authenticator of transfers; it runs the proof even without a token."""
    return authentication.ConnectionAuthenticator(
        credentials, authentication.TRANSFER, always_proves=True
    )


def enter(
    link: Link,
    limit: TimeLimit,
    *,
    name: str,
    epoch: str,
    authenticator: authentication.ConnectionAuthenticator,
) -> None:
    """Authenticate as a client. Raises TransferError if the server is another one, or refuses us."""
    link.secure(limit)
    try:
        authenticator.authenticate_server(
            lambda output: link.send_bytes(output, limit),
            lambda size: link.receive_bytes(size, limit),
        )
    except errors.RemoteProtocolError as error:
        raise errors.TransferError(f"the peer {error}") from error
    except errors.TransferError as error:
        if authenticator.tls is not None:
            raise
        raise errors.TransferError(
            f"{error}, before the peer had proven that it is one of us:"
            f" {authentication.MAY_WANT_CERTIFICATES}"
        ) from error
    padding_bytes = messages.MAX_PADDING_BYTES
    link.send(messages.AgentHello(name, epoch, padding_bytes), limit)
    max_bytes = padding_bytes + messages.MAX_GREETING_BYTES
    link.receive(messages.AgentWelcome, limit=limit, max_bytes=max_bytes)


def admit(
    link: Link, *, authenticator: authentication.ConnectionAuthenticator, limit: TimeLimit
) -> None:
    """Authenticate a client of our cluster, as a server. Raises RemoteProtocolError if it does not succeed."""
    try:
        link.secure(limit)
        authenticator.authenticate_client(
            lambda output: link.send_bytes(output, limit),
            lambda size: link.receive_bytes(size, limit),
        )
    except errors.TransferError as error:
        raise errors.RemoteProtocolError(
            f"{str(error).removeprefix('the peer ')}, before it had proven that it is one of us"
        ) from error


def welcome(link: Link, *, epoch: str, limit: TimeLimit) -> str:
    """Check that an authenticated client expects this server; return its name. Raises RemoteProtocolError if not."""
    hello = link.receive(messages.AgentHello, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
    if hello.epoch != epoch:
        raise errors.RemoteProtocolError(
            "the worker has restarted since it gave out its metadata; ask for its new one"
        )
    padding_bytes = min(max(hello.padding_bytes, 0), messages.MAX_PADDING_BYTES)
    link.send(messages.AgentWelcome(bytes(padding_bytes)), limit)
    return hello.name


@functools.cache
def _decoder(kinds: tuple[type[M], ...]) -> msgspec.msgpack.Decoder[M | messages.Refused]:
    return msgspec.msgpack.Decoder(Union[*kinds, messages.Refused])


def _bites(
    memory: memoryview, spans: Sequence[messages.Span], *, num_last: int = 0
) -> Iterator[list[memoryview]]:
    """Yield the bytes of all spans, in order, in lists that are short enough for one call.

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
    """Return the rest of the buffers after `num_done` bytes."""
    for i, buffer in enumerate(buffers):
        if num_done < len(buffer):
            return [buffer[num_done:], *buffers[i + 1 :]]
        num_done -= len(buffer)
    return []


def lost(error: OSError) -> errors.TransferError:
    """Return the error to raise for a broken connection."""
    if isinstance(error, ssl.SSLError):
        return errors.TransferError(f"the peer {authentication.describe_tls_failure(error)}")
    return errors.TransferError(f"the connection to the peer broke: {error}")
