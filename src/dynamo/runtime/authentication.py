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
import ssl
import threading
from collections.abc import Callable
from typing import cast

from dynamo.base import clock, errors, membership, proof, tls
from dynamo.observability import logs
from dynamo.protocols import wire

REQUEST_PLANE = "request plane"
EVENT_PLANE = "event plane"
TRANSFER = "transfer"
MAY_WANT_CERTIFICATES = "it may want certificates (--cluster-tls-cert-path); see its log"
MakeProtocol = Callable[[], asyncio.Protocol]
_REPEAT_S = 600.0
_MAX_REFUSALS = 1024
_OUR_SIDE = {  # what OpenSSL found wrong with the peer's certificate, by its code
    9: "shows a certificate that is not valid yet: compare the clocks of both hosts",
    10: "shows a certificate that has expired, or whose authority has: renew it there (--cluster-tls-cert-path)",
    **dict.fromkeys(
        (2, 18, 19, 20, 21),
        "shows a certificate of an authority that we do not know: expected one of --cluster-tls-ca-cert-path",
    ),
}
_PEERS_SIDE = (  # a part of OpenSSL's word for what the peer said, or did not say
    ("ALERT_CERTIFICATE_EXPIRED", "refuses our certificate, which has expired, or whose authority"
     " has: renew it (--cluster-tls-cert-path)"),
    ("ALERT_UNKNOWN_CA", "refuses our certificate, whose authority it does not know: give every process the same"
     " (--cluster-tls-ca-cert-path)"),
    ("ALERT_CERTIFICATE_REQUIRED", "wants a certificate, and we show none: give us one (--cluster-tls-cert-path)"),
    ("CERTIFICATE", "{reason}"),
    ("WRONG_VERSION", "does not speak TLS: give it certificates (--cluster-tls-cert-path)"),
    ("HTTP_REQUEST", "does not speak TLS: give it certificates (--cluster-tls-cert-path)"),
)  # fmt: skip

_log = logging.getLogger(__name__)


class ConnectionAuthenticator:
    """The means to authenticate the peers of one purpose: both sides need the same token, TLS certificates, or both."""

    def __init__(
        self, credentials: membership.Credentials, purpose: str, *, always_proves: bool = False
    ) -> None:
        """With `always_proves` the proof runs even without a token, with an empty key that proves nothing."""
        self._credentials, self._purpose = credentials, purpose
        self._always_proves = always_proves
        self._derived: tuple[membership.Credentials, tuple[bytes, ...]] = (
            credentials,
            self._derive(credentials),
        )

    @property
    def tls(self) -> membership.Tls | None:
        """The certificates as they are now."""
        return self._credentials.current().tls

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of the accepted tokens as they are now, that of the shown one first; empty: nothing is proven."""
        credentials = self._credentials.current()
        if credentials is not self._derived[0]:
            self._derived = credentials, self._derive(credentials)
        return self._derived[1]

    @property
    def is_open(self) -> bool:
        """True if peers show nothing: neither a token nor certificates are configured."""
        return self.tls is None and not any(self.keys)

    @property
    def has_files(self) -> bool:
        """True if the credentials may change."""
        return self._credentials.files is not None

    @property
    def curve_secrets(self) -> dict[str, bytes]:
        """The secret keys of ZeroMQ's CURVE that publishers use, by a name that does not betray them, ours first."""
        return {
            proof.derive_key(key, "name of the key").hex()[:16]: key for key in self.keys if key
        }

    def client_steps(self) -> proof.Steps | None:
        """Start the proof of the side that connects; None if there is none to give."""
        keys = self.keys
        return proof.client_steps(keys[0], _nonce()) if keys else None

    def server_steps(self) -> proof.Steps | None:
        """Start the proof of the side that listens; None if there is none to give."""
        keys = self.keys
        return proof.server_steps(keys[0], _nonce(), *keys[1:]) if keys else None

    def _derive(self, credentials: membership.Credentials) -> tuple[bytes, ...]:
        return credentials.derive_keys(self._purpose) or ((b"",) if self._always_proves else ())

    def authenticate_server(
        self, send: Callable[[bytes], None], receive: Callable[[int], bytes]
    ) -> None:
        """Prove the token to a server over a blocking connection, and check its proof. Raises RemoteProtocolError.

        `receive(n)` returns exactly `n` bytes. Errors of both functions pass through.
        """
        _run_steps(self.client_steps(), send, receive)

    def authenticate_client(
        self, send: Callable[[bytes], None], receive: Callable[[int], bytes]
    ) -> None:
        """Check the proof of a client over a blocking connection, and prove the token to it; as the other side."""
        _run_steps(self.server_steps(), send, receive)


def _run_steps(
    steps: proof.Steps | None, send: Callable[[bytes], None], receive: Callable[[int], bytes]
) -> None:
    if steps is None:
        return
    step = next(steps)
    send(step.output)
    while step.num_expected:
        step = steps.send(receive(step.num_expected))
        send(step.output)


def _nonce() -> bytes:
    return secrets.token_bytes(proof.NONCE_BYTES)


def describe_tls_failure(error: Exception | None) -> str:
    """Return which check of TLS failed, and what to do; it continues a sentence that names the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        refusal = f"shows a certificate that we refuse: {error.verify_message}"
        return _OUR_SIDE.get(error.verify_code, refusal)
    if not isinstance(error, ssl.SSLError):
        detail = f" ({error})" if str(error or "") else ""
        return (
            f"ended TLS's handshake without a reason{detail}: it may have no certificates"
            " (--cluster-tls-cert-path); see its log"
        )
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "shows no certificate: give it one (--cluster-tls-cert-path)"
    return next(
        (text for part, text in _PEERS_SIDE if part in reason), f"fails in TLS: {reason}"
    ).format(reason=f"refuses our certificate: {reason}")


async def secure(
    transport: asyncio.Transport,
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
    *,
    is_server: bool,
    limit_s: float,
) -> asyncio.Transport:
    """Return the connection with TLS, of which `protocol` gets the data. Raises OSError, also if it was closed."""
    with tls.written_to(transport):
        secured = await asyncio.get_running_loop().start_tls(
            transport, protocol, context, server_side=is_server, ssl_handshake_timeout=limit_s
        )
    if secured is None:  # start_tls's way to say that the connection was closed or dropped
        raise ConnectionAbortedError
    return secured


class TlsArrival(asyncio.Protocol):
    """The protocol of a connection to a server until its handshake of TLS is complete; then another one has it.

    asyncio's own servers do not tell how many connections are in a handshake, and each of them is an open file.
    """

    def __init__(
        self,
        protocol: asyncio.Protocol,
        context: ssl.SSLContext,
        arriving: set[asyncio.Task[None]],
        has_room: Callable[[], bool],
        *,
        limit_s: float,
    ) -> None:
        """`arriving` holds the handshakes of the server; a connection that comes when it has no room is dropped."""
        self._protocol, self._context = protocol, context
        self._arriving, self._has_room = arriving, has_room
        self._limit_s = limit_s
        self._early_data = b""  # came before `start_tls` returned

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        if not self._has_room():
            plain.abort()
            return
        plain.pause_reading()  # its first bytes are for TLS
        handshake = asyncio.get_running_loop().create_task(self._shake_hands(plain))
        self._arriving.add(handshake)
        handshake.add_done_callback(self._arriving.discard)

    def data_received(self, data: bytes) -> None:
        self._early_data += data

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        try:
            secured = await secure(
                plain, self, self._context, is_server=True, limit_s=self._limit_s
            )
        except OSError:  # ssl's errors are of this class
            plain.abort()
            return
        secured.set_protocol(self._protocol)
        self._protocol.connection_made(secured)
        if self._early_data and not secured.is_closing():
            self._protocol.data_received(self._early_data)


class RefusalLog:
    """The log of refused and refusing peers: each reason once for each peer, and again after ten minutes.

    May be called from any thread.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float]) -> None:
        self._log = logs.PeerLog(logger, now)
        self._now = now
        self._lock = threading.Lock()
        self._logged_at: dict[tuple[str, str], float] = {}  # by peer and line; oldest first

    def warning(self, peer: str, message: str, *arguments: object) -> None:
        """Log a warning about `peer`, by which its lines are counted: its host, or an address from discovery."""
        line = peer, message % arguments
        with self._lock:
            now = self._now()
            if now - self._logged_at.get(line, float("-inf")) < _REPEAT_S:
                return
            if not self._log.warning(peer, "%s", line[1]):
                return  # another line of this peer was just logged: this one comes with its repetition
            self._logged_at.pop(line, None)
            self._logged_at[line] = now
            if len(self._logged_at) > _MAX_REFUSALS:
                del self._logged_at[next(iter(self._logged_at))]


def describe_dropped(host: str, reason: str) -> str:
    """Return the line for a connection to the request plane that was dropped."""
    at = f" at {host}" if host else ""
    return f"dropped a connection to the request plane: the peer{at} {reason}"


class Handshake(asyncio.Protocol, abc.ABC):
    """The protocol of a connection until the peer has proven itself; the transport then goes to a new protocol."""

    _advice = ""  # for a peer that closes the connection without a word

    def __init__(self, steps: proof.Steps | None, make_protocol: MakeProtocol) -> None:
        """Without steps there is nothing to prove: TLS has done it."""
        self._exchange = None if steps is None else proof.ProofExchange(steps)
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
        if isinstance(exc, ssl.SSLError):
            self.report_failure(describe_tls_failure(exc))
            return
        cause = f" ({exc})" if exc else ""
        self.report_failure(
            f"closed the connection before it had proven that it is one of us{cause}{self._advice}"
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
        super().__init__(authenticator.client_steps(), make_protocol)
        self.completed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address
        if authenticator.tls is None:
            self._advice = f": {MAY_WANT_CERTIFICATES}"

    def report_failure(self, reason: str) -> None:
        if not self.completed.done():
            self.completed.set_exception(errors.WorkerLost(f"worker at {self._address} {reason}"))
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
        super().__init__(pending.authenticator.server_steps(), pending.make_protocol)
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
            self._pending.log.warning(self.host, "%s", describe_dropped(self.host, reason))

    def _stop_waiting(self) -> bool:
        """Leave the pending connections; return False if this one had left already."""
        if self._timer is not None:
            self._timer.cancel()
        return self._pending.discard(self)

    async def _start_tls(self, transport: asyncio.Transport, tls: membership.Tls) -> None:
        try:
            secured = await secure(
                transport, self, tls.server, is_server=True, limit_s=self._pending.limit_s
            )
        except OSError as error:  # ssl's errors are of this class
            self.drop(describe_tls_failure(error))
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
        self.log = RefusalLog(_log, time.now)
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
        for handshake in list(self._handshakes):
            handshake.drop("connected while this process was closing")
