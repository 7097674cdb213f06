"""The request plane over TCP, the default. An address is `host:port`.

With a cluster token or certificates each connection begins with a handshake (`runtime.authentication`); without, only
loopback is listened on.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any, cast

from dynamo.base import addresses, clock, errors, membership
from dynamo.runtime import authentication, listening
from dynamo.runtime.backends import frame_connection, multiplex

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", 0x10), 15),  # macOS: TCP_KEEPALIVE
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
# After a cut of seconds, the kernel sends again only when as long a time has passed once more, unless that is bounded.
_TCP_RTO_MAX_MS, _LONGEST_RETRY_MS = 44, 1000
# The kernel repeats a lost attempt to connect after 1, 3 and 7 s: a host that comes back between is found by a new one.
_NEXT_ATTEMPT_S, _MAX_ATTEMPTS = 0.5, 6


class TcpNetwork:
    """Listens on one host, at the first free one of its ports."""

    name = "tcp"

    def __init__(
        self,
        listen_address: listening.ListenAddress = listening.ListenAddress(),  # noqa: B008 (a frozen value)
        *,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        time: clock.Clock | None = None,
    ) -> None:
        """Raises ConfigError for a host that peers cannot connect to, or that is open to the whole network."""
        self._address = listen_address.checked()
        for host in self._address.hosts:
            membership.check_address(host, "the request plane (DYN_TCP_RPC_HOST)", credentials)
        self._authenticator = authentication.ConnectionAuthenticator(
            credentials, authentication.REQUEST_PLANE
        )
        self._limits = limits
        self._clock = time or clock.SystemClock()

    async def listen(self, make_protocol: authentication.MakeProtocol) -> multiplex.NetworkListener:
        pending = authentication.PendingConnections(
            self._authenticator,
            make_protocol,
            limit_s=self._limits.hello_s,
            max_pending=self._limits.max_pending,
            time=self._clock,
        )
        make: authentication.MakeProtocol = functools.partial(
            authentication.ServerHandshake, pending
        )
        listening = self._address.listen()
        notice_dead_peers(listening)  # connections to it inherit these options
        port = listening.getsockname()[1]
        server = await asyncio.get_running_loop().create_server(
            make_protocol if self._authenticator.is_open else make, sock=listening
        )

        def close() -> None:
            server.close()
            pending.close()

        return multiplex.NetworkListener(address=self._address.published(port), close=close)

    async def connect(self, address: str, make_protocol: authentication.MakeProtocol) -> None:
        if self._authenticator.is_open:
            await self._dial(address, make_protocol)
            return
        handshake = authentication.ClientHandshake(self._authenticator, make_protocol, address)
        try:
            await self._dial(address, lambda: handshake)
            await handshake.completed
        finally:
            if not handshake.completed.done():
                handshake.abandon()

    async def _dial(self, address: str, make: Callable[[], asyncio.Protocol]) -> None:
        try:
            host, port = addresses.split(address)
        except ValueError as error:
            raise errors.WorkerLost(f"cannot connect to the worker: {error}") from error
        tls = self._authenticator.tls
        try:
            transport = await _connect(host, port)
        except (OSError, UnicodeError) as error:
            raise errors.WorkerLost(
                f"cannot connect to the worker at {address}: {error}"
            ) from error
        protocol = make()
        if tls is None:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            transport.resume_reading()
            return
        try:
            secured = await authentication.secure(
                transport, protocol, tls.client, is_server=False, limit_s=self._limits.connect_s
            )
        except OSError as error:  # ssl's errors are of this class
            reason = authentication.describe_tls_failure(error)
            raise errors.WorkerLost(f"worker at {address} {reason}") from error
        if not secured.is_closing():  # else the protocol knows why
            protocol.connection_made(secured)


class TcpRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of a process among others."""

    def __init__(
        self,
        listen_address: listening.ListenAddress = listening.ListenAddress(),  # noqa: B008 (a frozen value)
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
        *,
        item_type: Any = Any,
        time: clock.Clock | None = None,
        instance_id: int = 0,
    ) -> None:
        network = TcpNetwork(listen_address, credentials=credentials, limits=limits, time=time)
        super().__init__(network, limits, item_type=item_type, time=time, instance_id=instance_id)


class _HeldConnection(asyncio.Protocol):
    """Reads nothing until the connection has its own protocol."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).pause_reading()


async def _connect(host: str, port: int) -> asyncio.Transport:
    """Return the first connection of several attempts, which begin while none is answered. Raises OSError."""
    loop = asyncio.get_running_loop()
    attempts: list[asyncio.Task[tuple[asyncio.Transport, Any]]] = []
    try:
        while True:
            attempts.append(loop.create_task(loop.create_connection(_HeldConnection, host, port)))
            wait_s = _NEXT_ATTEMPT_S if len(attempts) < _MAX_ATTEMPTS else None
            done, _ = await asyncio.wait(attempts, timeout=wait_s, return_when="FIRST_COMPLETED")
            if done:
                answered = done.pop()
                transport, _ = answered.result()
                attempts.remove(answered)
                notice_dead_peers(transport.get_extra_info("socket"))
                return transport
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_close_connection)
            attempt.cancel()


def _close_connection(attempt: asyncio.Task[tuple[asyncio.Transport, Any]]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result()[0].abort()


def notice_dead_peers(sock: socket.socket) -> None:
    """Send small frames at once, and end a connection after half a minute without a sign of its peer's host."""
    for level, name, value in _OPTIONS:
        sock.setsockopt(level, name, value)
    with contextlib.suppress(OSError):  # kernels before 6.15 do not know it
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_RETRY_MS)
