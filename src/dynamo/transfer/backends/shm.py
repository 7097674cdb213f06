"""Transfers on one host: the peer's pool is mapped once, on connecting, and bytes are copied once, by the posting side.

A socket brings the descriptor of the memory and, later, notifications. It lives in the abstract namespace under a
random name, so nothing is left on any disk by a process that is killed; the kernel names the user at the other
end, and both sides drop a peer of another user, and of another cluster if there is a token. A copy needs no help of
the peer, not even that it lives: its memory stays as long as it is mapped here.
"""

import functools
import os
import secrets
import socket

from dynamo.base import errors, membership
from dynamo.transfer import api, memory, messages, server
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import Link, enter, new_authenticator
from dynamo.transfer.link_pool import LinkPool
from dynamo.transfer.plan import Pattern


class ShmBackend:
    """The backend for regions in shared memory."""

    name = "shm"
    is_same_host = True

    def __init__(self, *, credentials: membership.Credentials = membership.NO_CREDENTIALS) -> None:
        self._authenticator = new_authenticator(credentials)
        self._service: server.TransferServer | None = None
        self._exposed: api.Exposed | None = None
        self._window: memory.Window | None = None

    def listen(self, exposed: api.Exposed) -> str | None:
        if exposed.descriptor is None:
            return None
        address = f"dynamo-transfer-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + address)
        self._exposed, self._window = exposed, memory.Window(exposed.region.memory)
        self._service = server.TransferServer(
            sock, exposed, authenticator=self._authenticator, check=check_user
        )
        return address

    def connect(self, target: api.PeerTarget, limit: TimeLimit) -> "ShmRoute":
        assert self._exposed is not None, "connect before listen"
        assert self._window is not None
        own = self._exposed
        greet = functools.partial(
            enter, name=own.name, epoch=target.epoch, authenticator=self._authenticator
        )
        links = LinkPool(lambda limit: connect(target.address, limit), greet)
        with links.borrow(limit) as link:
            link.send(messages.Attach(), limit)
            link.receive(messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
            pool = memory.map_peers(link.receive_descriptor(limit), target.num_bytes)
        return ShmRoute(self._window, memory.Window(pool), links)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._window is not None:
            self._window.close()


class ShmRoute:
    """A route that copies between two mapped pools; its socket carries notifications."""

    def __init__(self, local: memory.Window, remote: memory.Window, links: LinkPool) -> None:
        self._local, self._remote, self._links = local, remote, links

    def move(self, operation: api.TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
        memory.move(operation, self._local, self._remote, pattern, limit)

    def probe(self, num_bytes: int, limit: TimeLimit) -> None:
        """Do nothing: no byte crosses a network."""

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        self._links.notify(message, limit)

    def close(self) -> None:
        self._links.close()
        self._remote.close()


def check_user(link: Link) -> None:
    """Check the user at the other end. Raises TransferError for another one."""
    if (uid := link.peer_uid()) != os.getuid():
        raise errors.TransferError(
            f"expected a process of our user {os.getuid()} at the other end, found user {uid}"
        )


def connect(address: str, limit: TimeLimit) -> Link:
    """Return a link to the worker of our user at this abstract address. Raises TransferError."""
    timeout_s = limit.remaining_s()
    sock: socket.socket | None = None
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        sock.connect("\0" + address)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        raise errors.TransferError(f"cannot connect to the worker on this host: {error}") from error
    link = Link(sock)
    try:
        check_user(link)
    except errors.TransferError:
        link.close()
        raise
    return link
