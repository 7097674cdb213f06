"""Addresses of hosts and ports as text: `host:port`, where an IPv6 address stands in brackets (RFC 3986, 3.2.2)."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dynamo.base import errors

_MAX_PORT = 65535
Listener = TypeVar("Listener")


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports out of which a listener takes the first free one; 0 lets the system choose any."""

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> "PortRange":
        """Parse `7000` or `7000-7099`. Raises ValueError."""
        first, dash, last = text.partition("-")
        ports = cls(int(first), int(last if dash else first))
        if not (0 <= ports.first <= ports.last <= _MAX_PORT) or (dash and not ports.first):
            raise ValueError(f"expected a port or a range of ports like 7000-7099, got {text!r}")
        return ports

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return str(self.first) if len(self) == 1 else f"{self.first}-{self.last}"

    def bind(self, bind: Callable[[int], Listener]) -> Listener:
        """Return what `bind` returns for the first port that is not in use. Raises its OSError if all are."""
        for port in range(self.first, self.last):
            try:
                return bind(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        return bind(self.last)


ANY_PORT = PortRange()
DEFAULT_SYSTEM_PORT = 9090  # of NVIDIA Dynamo's processes, where DYN_SYSTEM_ENABLED asks for one


def system_ports(ports: PortRange | None, is_enabled: bool | None) -> PortRange | None:
    """Return the ports of which /health takes the first free one; None: there is no system port.

    `is_enabled` is None where DYN_SYSTEM_ENABLED says nothing: then there is one if it has `ports`.
    """
    if is_enabled is False:
        return None
    return (
        PortRange(DEFAULT_SYSTEM_PORT, DEFAULT_SYSTEM_PORT)
        if is_enabled and ports is None
        else ports
    )


def plain_host(text: str, setting: str) -> str:
    """Return a host name or address without brackets.

    Raises ConfigError, which names `setting`, for an address that is valid on one link only (`fe80::1`, or with the
    link's name `fe80::1%eth0`): other hosts call the link by other names, so it cannot be published.
    """
    host = text.removeprefix("[").removesuffix("]")
    if ":" in host and ("%" in host or host.lower().startswith("fe80:")):
        raise errors.ConfigError(
            f"{setting} is {text!r}: expected an address that other hosts can use, got one of a single link;"
            " take a global or a unique local address (2000::/3, fd00::/8)"
        )
    return host


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def source_address(host: str, port: int) -> str:
    """Return the address of the interface that leads to a host, without sending anything. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_address(name: str) -> bool:
    """Return whether a host is given by its number instead of a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the numeric form of the first address of a host. Raises OSError if it has none."""
    if is_address(host):
        return socket.AF_INET6 if ":" in host else socket.AF_INET, host
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # of an empty or too long part, such as in a..b
        raise OSError(errno.EINVAL, "no name of a host") from error
    return family, str(address[0])
