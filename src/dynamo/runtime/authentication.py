"""The authentication of connections between processes: TLS, and the proof that both sides know the cluster's token.

One `ConnectionAuthenticator` serves each use of the cluster's credentials (`base.membership`), with a key of its own:

- the request plane: its connections begin as a `ClientHandshake` or `ServerHandshake`. A handshake stands in the
  place of the connection's protocol, and hands the transport over when the peer has proven itself. From then on it is
  gone, so it costs nothing per frame;
- transfers: their blocking sockets call `authenticate_server` and `authenticate_client`;
- the event plane: its ZeroMQ sockets take `curve_secret` for CURVE.

Pending connections are cheap: each holds some bytes for a few seconds, and a listener has a limited number. When that
is reached, a new one replaces the oldest of the host that has most of them, so that a flood from one host displaces
connections of that host only.
"""

import abc
import asyncio
import collections
import logging
import secrets
from collections.abc import Callable
from typing import cast

from dynamo.base import clock, errors, membership, proof
from dynamo.observability import logs
from dynamo.protocols import wire

REQUEST_PLANE = "request plane"
EVENT_PLANE = "event plane"
TRANSFER = "transfer"
MakeProtocol = Callable[[], asyncio.Protocol]
DROPPED = "dropped a connection to the request plane: the peer %s"

_log = logging.getLogger(__name__)


class ConnectionAuthenticator:
    """The means to authenticate the peers of one purpose: both sides need the same token, TLS certificates, or both."""

    def __init__(
        self, credentials: membership.Credentials, purpose: str, *, always_proves: bool = False
    ) -> None:
        """With `always_proves` the proof runs even without a token, with an empty key that proves nothing."""
        self.tls = credentials.tls
        self.key = credentials.derive_key(purpose)
        if self.key is None and always_proves:
            self.key = b""

    @property
    def is_open(self) -> bool:
        """True if peers show nothing: neither a token nor certificates are configured."""
        return self.tls is None and not self.key

    @property
    def curve_secret(self) -> bytes | None:
        """The secret key of ZeroMQ's CURVE that all publishers of the cluster share; None without a token."""
        return self.key or None

    def client_exchange(self) -> proof.Exchange | None:
        """Start the proof of the side that connects; None if there is none to give."""
        return None if self.key is None else proof.Exchange(proof.client_steps(self.key, _nonce()))

    def server_exchange(self) -> proof.Exchange | None:
        """Start the proof of the side that listens; None if there is none to give."""
        return None if self.key is None else proof.Exchange(proof.server_steps(self.key, _nonce()))

    def authenticate_server(
        self, send: Callable[[bytes], None], receive: Callable[[int], bytes]
    ) -> None:
        """Prove the token to a server over a blocking connection, and check its proof. Raises RemoteProtocolError.

        `receive(n)` returns exactly `n` bytes. Errors of both functions pass through.
        """
        if self.key is not None:
            _run_steps(proof.client_steps(self.key, _nonce()), send, receive)

    def authenticate_client(
        self, send: Callable[[bytes], None], receive: Callable[[int], bytes]
    ) -> None:
        """Check the proof of a client over a blocking connection, and prove the token to it; as the other side."""
        if self.key is not None:
            _run_steps(proof.server_steps(self.key, _nonce()), send, receive)


def _run_steps(
    steps: proof.Steps, send: Callable[[bytes], None], receive: Callable[[int], bytes]
) -> None:
    step = next(steps)
    send(step.output)
    while step.num_expected:
        step = steps.send(receive(step.num_expected))
        send(step.output)


def _nonce() -> bytes:
    return secrets.token_bytes(proof.NONCE_BYTES)


class Handshake(asyncio.Protocol, abc.ABC):
    """The protocol of a connection until the peer has proven itself; the transport then goes to a new protocol."""

    def __init__(self, exchange: proof.Exchange | None, make_protocol: MakeProtocol) -> None:
        """Without an exchange there is nothing to prove: TLS has done it."""
        self._exchange = exchange
        self._make_protocol = make_protocol
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._begin(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data before a connection"
        assert self._exchange is not None, (
            "without an exchange the transport is handed over at once"
        )
        if self._transport.is_closing():
            return
        try:
            output = self._exchange.feed(data)
        except errors.RemoteProtocolError as error:
            self._refuse(str(error))
            return
        if output:
            self._transport.write(output)
        if self._exchange.is_complete:
            self._hand_over(self._transport, self._exchange.remainder)

    def connection_lost(self, exc: Exception | None) -> None:
        cause = f" ({exc})" if exc else ""
        self.report_failure(
            f"closed the connection before it had proven that it is one of us{cause}"
        )

    @abc.abstractmethod
    def report_failure(self, reason: str) -> None:
        """Handle the end of an unproven connection; `reason` continues a sentence that names the peer."""

    def _begin(self, transport: asyncio.Transport, early_data: bytes = b"") -> None:
        self._transport = transport
        if self._exchange is None:
            self._hand_over(transport, early_data)
            return
        if self._exchange.first_output:
            transport.write(self._exchange.first_output)
        if early_data:
            self.data_received(early_data)

    def _hand_over(self, transport: asyncio.Transport, early_data: bytes) -> None:
        protocol = self._make_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if early_data:
            protocol.data_received(early_data)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        self.report_failure(reason)
        self._transport.close()


class ClientHandshake(Handshake):
    """The handshake of the side that connects. `completed` is done when it succeeded, or fails with WorkerLost."""

    def __init__(
        self, authenticator: ConnectionAuthenticator, make_protocol: MakeProtocol, address: str
    ) -> None:
        super().__init__(authenticator.client_exchange(), make_protocol)
        self.completed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address

    def report_failure(self, reason: str) -> None:
        if not self.completed.done():
            message = f"worker at {self._address} {reason}"
            _log.warning("%s", message)
            self.completed.set_exception(errors.WorkerLost(message))
            self.completed.exception()  # marked as retrieved, even if the waiting task has left

    def abandon(self) -> None:
        """Drop the connection, because its caller waits no longer."""
        self.completed.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _hand_over(self, transport: asyncio.Transport, early_data: bytes) -> None:
        super()._hand_over(transport, early_data)
        if not self.completed.done():
            self.completed.set_result(None)


class ServerHandshake(Handshake):
    """The handshake of the side that listens: TLS first, then the proof, all within a time limit."""

    def __init__(self, pending: "PendingConnections") -> None:
        super().__init__(pending.authenticator.server_exchange(), pending.make_protocol)
        self.host = ""  # of the peer
        self._pending = pending
        self._early_data = b""  # came before `start_tls` returned
        self._raw_transport: asyncio.Transport | None = None  # below TLS
        self._tls_task: asyncio.Task[None] | None = None
        self._timer: clock.Timer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw_transport = cast(asyncio.Transport, transport)
        self.host = transport.get_extra_info("peername", ("",))[0]
        limit_s = self._pending.limit_s
        self._timer = self._pending.clock.call_later(
            limit_s, self.drop, f"did not prove within {limit_s:g} s that it is one of us"
        )
        self._pending.add(self)
        tls = self._pending.authenticator.tls
        if tls is None:
            self._begin(self._raw_transport)
        else:
            self._raw_transport.pause_reading()  # its first bytes are for TLS
            self._tls_task = asyncio.get_running_loop().create_task(
                self._start_tls(self._raw_transport, tls)
            )

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            self._early_data += data
        else:
            super().data_received(data)

    def drop(self, reason: str) -> None:
        """Break the connection now."""
        self.report_failure(reason)
        if self._raw_transport is not None:
            self._raw_transport.abort()

    def report_failure(self, reason: str) -> None:
        if self._stop_waiting():
            self._pending.log.warning(self.host, DROPPED, reason)

    def _stop_waiting(self) -> bool:
        """Leave the pending connections; return False if this one had left already."""
        if self._timer is not None:
            self._timer.cancel()
        return self._pending.discard(self)

    async def _start_tls(self, transport: asyncio.Transport, tls: membership.Tls) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                tls.server,
                server_side=True,
                ssl_handshake_timeout=self._pending.limit_s,
            )
        except OSError as error:  # ssl's errors are of this class
            self.drop(f"is not one of us by TLS: {error}")
            return
        if secured is None:  # start_tls's way to say that the connection was closed or dropped
            self.drop("closed the connection")
            return
        self._begin(secured, self._early_data)

    def _hand_over(self, transport: asyncio.Transport, early_data: bytes) -> None:
        if self._stop_waiting():
            super()._hand_over(transport, early_data)

    def _refuse(self, reason: str) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(wire.Goodbye(f"the peer {reason}")))
        super()._refuse(reason)


class PendingConnections:
    """The connections of one listener that have not proven themselves yet, the oldest first."""

    def __init__(
        self,
        authenticator: ConnectionAuthenticator,
        make_protocol: MakeProtocol,
        *,
        limit_s: float,
        max_pending: int,
        time: clock.Clock,
    ) -> None:
        """`limit_s`: seconds that a peer has for TLS and its proof."""
        self.authenticator, self.make_protocol = authenticator, make_protocol
        self.limit_s, self.clock = limit_s, time
        self.log = logs.PeerLog(_log, time.now)
        self._max_pending = max_pending
        self._handshakes: dict[ServerHandshake, None] = {}

    def add(self, handshake: ServerHandshake) -> None:
        """Add a connection, and drop the oldest of the host that has most if there are too many."""
        if len(self._handshakes) >= self._max_pending:
            count_by_host = collections.Counter(pending.host for pending in self._handshakes)
            ((busiest, _),) = count_by_host.most_common(1)
            oldest = next(pending for pending in self._handshakes if pending.host == busiest)
            oldest.drop("gave way to newer connections, because too many are not authenticated")
        self._handshakes[handshake] = None

    def discard(self, handshake: ServerHandshake) -> bool:
        """Remove a connection that is authenticated or gone; return False if it was not here."""
        if handshake not in self._handshakes:
            return False
        del self._handshakes[handshake]
        return True

    def close(self) -> None:
        """Drop all pending connections."""
        for handshake in list(self._handshakes):
            handshake.drop("connected while this process was closing")
