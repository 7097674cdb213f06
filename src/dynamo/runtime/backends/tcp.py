"""The request plane over TCP, the default. An address is `host:port`.

With a cluster token or certificates a `door` stands before each connection; without, only loopback is listened on.
"""

import asyncio
import functools
import socket
from collections.abc import Callable

from dynamo.base import errors, membership
from dynamo.runtime.backends import door, link, multiplex

_WILDCARDS = ("", "0.0.0.0", "::")
# Small frames leave at once, and the kernel finds out when the peer of an idle connection is gone.
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
        credentials: membership.Credentials = membership.NOTHING,
        limits: link.Limits = link.Limits(),  # noqa: B008 (a frozen value)
    ) -> None:
        """Raises ConfigError for a host that is no address to give to others, or is open to strangers."""
        if host in _WILDCARDS:
            raise errors.ConfigError(
                f"DYN_TCP_RPC_HOST is {host!r}: expected the address by which other processes reach this one"
            )
        membership.check_address(host, "the request plane (DYN_TCP_RPC_HOST)", credentials)
        self._host = host
        self._port = port
        self._credentials = credentials
        self._limits = limits
        self._is_open = credentials.token is None and credentials.tls is None

    async def listen(self, make_link: multiplex.MakeLink) -> multiplex.Listener:
        loop = asyncio.get_running_loop()
        porch = door.Porch(self._limits, self._credentials, make_link)
        make = make_link if self._is_open else functools.partial(door.AnsweringDoor, porch)
        try:
            server = await loop.create_server(make, self._host, self._port)
        except OSError as error:
            raise errors.ConfigError(
                f"cannot listen on {self._host}:{self._port} (DYN_TCP_RPC_HOST, DYN_TCP_RPC_PORT): {error}"
            ) from error
        listening = server.sockets[0]
        _tune(listening)  # what connects to it inherits these options
        address = _join(self._host, listening.getsockname()[1])

        def close() -> None:
            server.close()
            porch.close()

        return multiplex.Listener(address=address, close=close)

    async def connect(self, address: str, make_link: multiplex.MakeLink) -> None:
        if self._is_open:
            await self._dial(address, make_link)
            return
        entrance = door.AskingDoor(self._credentials, make_link, address)
        try:
            await self._dial(address, lambda: entrance)
            await entrance.opened
        finally:
            if not entrance.opened.done():
                entrance.abandon()

    async def _dial(self, address: str, make: Callable[[], asyncio.Protocol]) -> None:
        host, port = _split(address)
        tls = self._credentials.tls
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                make, host, port, ssl=tls.asking if tls is not None else None
            )
        except (OSError, UnicodeError) as error:
            raise errors.WorkerLost(
                f"cannot connect to the worker at {address}: {error}"
            ) from error
        _tune(transport.get_extra_info("socket"))


class TcpRequestPlane(multiplex.MultiplexedPlane):
    """The request plane of a process among others."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: link.Limits = link.Limits(),  # noqa: B008 (a frozen value)
        credentials: membership.Credentials = membership.NOTHING,
    ) -> None:
        super().__init__(TcpNetwork(host, port, credentials=credentials, limits=limits), limits)


def _tune(sock: socket.socket) -> None:
    for level, name, value in _OPTIONS:
        sock.setsockopt(level, name, value)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise errors.WorkerLost(f"{address!r} is no address: expected host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
