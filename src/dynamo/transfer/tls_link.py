"""A link over TLS. Encryption costs a copy and the time of AES; what it protects needs no checksum of ours.

OpenSSL takes one buffer at a time, and a socket with Python's own timeout: a limit of the kernel's would look to it
like a call to be made again, for ever.
"""

import socket
import ssl

from dynamo.base import errors
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link, lost


class TlsLink(Link):
    """`secure` comes first."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Raises OSError if the connection is gone already."""
        super().__init__(sock)
        self._tls = context.wrap_socket(
            sock, server_side=is_server, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self._sock = self._tls

    def interrupt(self) -> None:
        """As of `Link`, below TLS: its own shutdown is not for other threads."""
        try:
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)
        except OSError:  # it was not connected any more, so nobody waits
            return

    def secure(self, limit: Limit) -> None:
        is_done = False
        while not is_done:
            self._tls.settimeout(limit.remaining_s())
            try:
                self._tls.do_handshake()
                is_done = True
            except TimeoutError:
                continue  # its time is over: the limit says so
            except OSError as error:
                raise errors.TransferError(
                    f"the peer is not one of our cluster by TLS: {error}"
                ) from error

    def _send(self, buffers: list[memoryview], limit: Limit, *, is_more: bool = False) -> None:
        for buffer in buffers:
            rest = buffer
            while rest:
                self._tls.settimeout(limit.remaining_s())
                try:
                    rest = rest[self._tls.send(rest) :]
                except TimeoutError:
                    continue  # its time is over: the limit says so
                except OSError as error:
                    raise lost(error) from error

    def _receive(self, buffers: list[memoryview], limit: Limit | None) -> None:
        for buffer in buffers:
            rest = buffer
            while rest:
                self._tls.settimeout(None if limit is None else limit.remaining_s())
                try:
                    num_received = self._tls.recv_into(rest)
                except TimeoutError:
                    continue
                except OSError as error:
                    raise lost(error) from error
                if not num_received:
                    raise errors.TransferError("the peer closed the connection")
                rest = rest[num_received:]

    def _wake_after(self, num_bytes: int) -> None:
        """No: OpenSSL holds a part of what has come, so that the kernel could wait for it in vain."""
