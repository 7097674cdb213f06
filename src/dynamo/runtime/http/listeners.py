"""Listening sockets of HTTP servers, and why one cannot be opened, in one sentence."""

import errno
import socket

from dynamo.base import errors


def open_listener(host: str, port: int, *, port_flag: str) -> socket.socket:
    """Return a socket that listens, for `HttpServer.start_on`. Raises ConfigError, naming `port_flag`."""
    try:
        if host == "::":
            return open_dual_socket(port, shares_port=False)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise errors.ConfigError(describe_failure(error, host, port, port_flag)) from error


def open_dual_socket(port: int, *, shares_port: bool) -> socket.socket:
    """Return a socket at all addresses of both families; of IPv6 alone where the host has no IPv4."""
    return socket.create_server(
        ("::", port),
        family=socket.AF_INET6,
        reuse_port=shares_port,
        dualstack_ipv6=socket.has_dualstack_ipv6(),
    )


def describe_failure(error: OSError, host: str, port: int, port_flag: str) -> str:
    """Say in one sentence why nothing can listen there."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: stop the other process or choose {port_flag}"
    if isinstance(error, socket.gaierror):
        return f"{host!r} is no address of this machine: {error.strerror}"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
