"""The addresses of listeners: where each listens, where others reach it, and why a socket cannot be opened.

The two addresses are the same, but behind a NAT or in a container with ports that are published elsewhere. Each plane
has its own settings, named alike: HOST and PORT for listening, ADVERTISE for what is published in discovery.
"""

import asyncio
import contextlib
import errno
import os
import random
import socket
import sys
from dataclasses import dataclass

from dynamo.base import addresses, errors, membership

_WILDCARDS = ("", "*", "0.0.0.0", "::")
# A process binds its port some time after it was found free. So it is chosen at random, for processes that start
# together, and not from the range of which the system gives ports to any process (usually 32768 and above). Where that
# time is long, as for an engine, the port is reserved meanwhile.
PORT_RANGE = range(20_000, 30_000)
_PORT_TRIES = 50
# Connections that asyncio accepts in one turn of the loop: few, so that those over a limit are closed before all files
# are taken. It also tries so often when they are, and logs each time.
ACCEPTED_AT_ONCE = 16
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where a listener listens, and where others reach it: the same, but behind a NAT or with `docker -p`."""

    host: str = "127.0.0.1"
    ports: addresses.PortRange = addresses.ANY_PORT
    advertised: str | None = None  # `host`, `host:port` or `host:7000-7099`; None: where it listens
    setting: str = "DYN_TCP_RPC_"  # the variables' names without HOST, PORT and ADVERTISE

    def checked(self) -> "ListenAddress":
        """Return the address with its hosts in plain form. Raises ConfigError if others could not reach it."""
        host = addresses.plain_host(self.host, f"{self.setting}HOST")
        if self.advertised is None or host in ("", "*"):
            if host in _WILDCARDS:
                raise errors.ConfigError(
                    f"{self.setting}HOST is {host!r}: expected the address by which other processes reach this one,"
                    f" or also that address in {self.setting}ADVERTISE"
                )
            return ListenAddress(host=host, ports=self.ports, setting=self.setting)
        name, ports = self._reached()
        is_mapped = ports is None or (self.ports.first and len(ports) == len(self.ports))
        if name in _WILDCARDS or not is_mapped:
            raise errors.ConfigError(
                f"{self.setting}ADVERTISE is {self.advertised!r}: expected the address by which other processes reach"
                f" this one, with or without a port; with ports, as many as {self.setting}PORT has, got {self.ports}"
            )
        return ListenAddress(
            host=host, ports=self.ports, advertised=self.advertised, setting=self.setting
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts on which it listens and by which it is reached, for checks."""
        return (self.host, self._reached()[0])

    def published(self, port: int) -> str:
        """Return the address at which others reach a listener on this port of `ports`."""
        host, ports = self._reached()
        return addresses.join(
            host, port if ports is None else ports.first + port - self.ports.first
        )

    def listen(self) -> socket.socket:
        """Return a socket that listens on the first free port. Raises ConfigError."""
        try:
            family, number = addresses.resolve(self.host)
            return self.ports.bind(lambda port: socket.create_server((number, port), family=family))
        except OSError as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> errors.ConfigError:
        """Return the error for a host or port that cannot be listened on."""
        where = f"[{self.host}]:{self.ports}" if ":" in self.host else f"{self.host}:{self.ports}"
        return errors.ConfigError(
            f"cannot listen on {where}: {error}; expected an address of this host and a free port"
            f" ({self.setting}HOST, {self.setting}PORT)"
        )

    def _reached(self) -> tuple[str, addresses.PortRange | None]:
        """Return the advertised host, and its ports if they are others. Raises ConfigError."""
        text, setting = self.advertised, f"{self.setting}ADVERTISE"
        if text is None:
            return self.host, None
        host, colon, ports = text.rpartition(":")
        if not colon or text.endswith("]") or (":" in host and not host.endswith("]")):
            return addresses.plain_host(text, setting), None
        try:
            return addresses.plain_host(host, setting), addresses.PortRange.parse(ports)
        except ValueError as error:
            raise errors.ConfigError(f"{setting} is {text!r}: {error}") from error


def choose_address(
    settings: membership.ClusterConfig,
    host: str | None,
    ports: addresses.PortRange,
    advertised: str | None,
    *,
    setting: str,
) -> ListenAddress:
    """Return the address of a listener; without a host and an advertised address of its own it has the common ones."""
    if advertised is None and host is None and settings.tcp_rpc_advertise is not None:
        advertised = ListenAddress(advertised=settings.tcp_rpc_advertise).hosts[1]
    return ListenAddress(
        host=host or settings.tcp_rpc_host, ports=ports, advertised=advertised, setting=setting
    )


def open_listener(host: str, port: int, *, port_flag: str) -> socket.socket:
    """Return a socket that listens, for `HttpServer.start_on`. Raises ConfigError, naming `port_flag`."""
    try:
        if host == "::":
            return open_dual_socket(port, shares_port=False)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        raise errors.ConfigError(describe_failure(error, host, port, port_flag)) from error


def open_dual_socket(port: int, *, shares_port: bool) -> socket.socket:
    """Return a socket at all addresses of both families; of IPv6 alone where the host has no IPv4."""
    return socket.create_server(
        ("::", port),
        family=socket.AF_INET6,
        reuse_port=shares_port,
        dualstack_ipv6=socket.has_dualstack_ipv6(),
    )


def describe_failure(error: OSError | UnicodeError, host: str, port: int, port_flag: str) -> str:
    """Say in one sentence why nothing can listen there; UnicodeError: no host can have this name."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"{host!r} is no address of this machine: {error.args[-1]}"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: stop the other process or choose {port_flag}"
    return f"cannot listen on {addresses.join(host, port)}: {error.strerror or error}"


def find_free_ports(num_ports: int) -> int:
    """Return the first of `num_ports` consecutive loopback ports that are free now, for a process that starts at once.

    Raises ConfigError.
    """
    with contextlib.ExitStack() as reservations:
        return reserve_ports(num_ports, reservations)


def reserve_ports(num_ports: int, reservations: contextlib.ExitStack) -> int:
    """Return the first of `num_ports` consecutive free loopback ports, and keep them until `reservations` is closed.

    Meanwhile no other process finds them free, but listeners with SO_REUSEADDR, as those of ZeroMQ and asyncio, can
    bind them. Raises ConfigError.
    """
    for _ in range(_PORT_TRIES):
        first = random.randrange(PORT_RANGE.start, PORT_RANGE.stop - num_ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as holders:
            for port in range(first, first + num_ports):
                holder = holders.enter_context(socket.socket())
                holder.bind(("127.0.0.1", port))
                # Set after the bind, which so refuses a port that another process has reserved.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":  # elsewhere a bound port cannot be bound again
                reservations.enter_context(holders.pop_all())
            return first
    raise errors.ConfigError(
        f"found no {num_ports} consecutive free ports from {PORT_RANGE.start} to {PORT_RANGE.stop}"
    )


def lengthen_backlogs(server: asyncio.Server) -> None:
    """Let more connections wait than are accepted at once."""
    for each in server.sockets:
        with socket.socket(fileno=os.dup(each.fileno())) as same:
            same.listen(_BACKLOG)


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Return `host:port` of the other side, or what there is in its place."""
    address = transport.get_extra_info("peername")
    if not isinstance(address, tuple):
        return str(address)
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"  # an address of IPv4 at `::`
