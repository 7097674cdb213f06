"""Ports for processes that a test starts, which no other process gets meanwhile.

A port that was free a moment ago may be taken by the time a process has started. So it stays bound here, without
listening: the system gives a bound port to no process that asks for any port, to listen or to connect from, but one
that names it may listen there, because both allow the address to be used again (SO_REUSEADDR, which all servers set).
"""

import collections
import os
import socket

_MOST = 64  # at once; more than one story needs
_held: collections.deque[int] = collections.deque()  # descriptors


def reserve() -> int:
    """A port on loopback."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    _held.append(held.detach())
    if len(_held) > _MOST:
        os.close(_held.popleft())
    return port
