"""The request plane over TCP, the default. An address is `host:port`.

With a cluster token or certificates each connection begins with a handshake (`runtime.authentication`); without, only
loopback is listened on.
"""

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

from dynamo.base import addresses, clock, errors, membership
from dynamo.runtime import authentication
from dynamo.runtime.backends import frame_connection, multiplex

_WILDCARDS = ("", "0.0.0.0", "::")
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class TcpNetwork:
    """Listens on one host and port; port 0 lets the system choose."""

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        time: clock.Clock | None = None,
    ) -> None:
        """Raises ConfigError for a host that peers cannot connect to, or that is open to the whole network."""
        if host in _WILDCARDS:
            raise errors.ConfigError(
                f"DYN_TCP_RPC_HOST is {host!r}: expected the address by which other processes reach this one"
            )
        self._host = addresses.plain_host(host, "DYN_TCP_RPC_HOST")
        membership.check_address(self._host, "the request plane (DYN_TCP_RPC_HOST)", credentials)
        self._port = port
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
        try:
            server = await asyncio.get_running_loop().create_server(
                make_protocol if self._authenticator.is_open else make, self._host, self._port
            )
        except OSError as error:
            raise errors.ConfigError(
                f"cannot listen on {addresses.join(self._host, self._port)}"
                f" (DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT): {error}"
            ) from error
        listening = server.sockets[0]
        notice_dead_peers(listening)  # connections to it inherit these options
        port = listening.getsockname()[1]

        def close() -> None:
            server.close()
            pending.close()

        return multiplex.NetworkListener(address=addresses.join(self._host, port), close=close)

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
            transport, _ = await asyncio.get_running_loop().create_connection(
                make, host, port, ssl=tls.client if tls is not None else None
            )
        except (OSError, UnicodeError) as error:
            raise errors.WorkerLost(
                f"cannot connect to the worker at {address}: {error}"
            ) from error
        notice_dead_peers(transport.get_extra_info("socket"))


class TcpRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of a process among others."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: frame_connection.ConnectionLimits = frame_connection.ConnectionLimits(),  # noqa: B008 (a frozen value)
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
        *,
        item_type: Any = Any,
        time: clock.Clock | None = None,
        instance_id: int = 0,
    ) -> None:
        network = TcpNetwork(host, port, credentials=credentials, limits=limits, time=time)
        super().__init__(network, limits, item_type=item_type, time=time, instance_id=instance_id)


def notice_dead_peers(sock: socket.socket) -> None:
    """Send small frames at once, and end a connection after half a minute without a sign of its peer's host."""
    for level, name, value in _OPTIONS:
        sock.setsockopt(level, name, value)
