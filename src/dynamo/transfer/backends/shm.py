"""On one host: the peer's pool is mapped once, when we connect, and bytes are copied once, by whoever posts.

A socket brings the descriptor of the memory and, later, notifications. It lives in the abstract namespace under a
random name, so nothing is left on any disk by a process that is killed; what protects it is the kernel's word on who
is at the other end: both sides drop a peer that belongs to another user, and one of another cluster, if there is a
token. A copy asks nothing of the peer, not even
that it lives: its memory stays as long as it is mapped here.
"""

import os
import secrets
import socket

from dynamo.base import errors, membership
from dynamo.transfer import api, handshake, links, memory, messages, routes, service
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link
from dynamo.transfer.plan import Pattern


class ShmBackend:
    """For regions that lie in shared memory."""

    name = "shm"
    capabilities = api.Capabilities(
        can_read=True, can_write=True, can_notify=True, is_same_host=True
    )

    def __init__(self, *, credentials: membership.Credentials = membership.NO_CREDENTIALS) -> None:
        self._authenticator = handshake.new_authenticator(credentials)
        self._service: service.Service | None = None
        self._exposed: routes.Exposed | None = None
        self._window: memory.Window | None = None

    def listen(self, exposed: routes.Exposed) -> str | None:
        if exposed.shared is None:
            return None
        address = f"dynamo-transfer-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + address)
        self._exposed, self._window = exposed, memory.Window(exposed.region.memory)
        self._service = service.Service(
            sock, exposed, authenticator=self._authenticator, check=check_user
        )
        return address

    def connect(self, target: routes.Target, limit: Limit) -> "ShmRoute":
        assert self._exposed is not None, "connect before listen"
        assert self._window is not None
        mine = self._exposed

        def greet(link: Link, limit: Limit) -> None:
            check_user(link)
            handshake.enter(
                link,
                name=mine.name,
                epoch=target.epoch,
                authenticator=self._authenticator,
                limit=limit,
            )

        peer = links.Links(lambda limit: _connect(target.address, limit), greet)
        with peer.borrow(limit) as link:
            link.send(messages.Attach(), limit)
            link.receive(messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)
            pool = memory.map_peers(link.receive_descriptor(limit), target.num_bytes)
        return ShmRoute(self._window, memory.Window(pool), peer)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._window is not None:
            self._window.close()


class ShmRoute:
    """Two windows; the socket is for words."""

    def __init__(self, ours: memory.Window, theirs: memory.Window, peer: links.Links) -> None:
        self._ours, self._theirs, self._links = ours, theirs, peer

    def move(self, operation: api.Operation, pattern: Pattern, limit: Limit) -> None:
        memory.move(operation, self._ours, self._theirs, pattern, limit)

    def notify(self, message: bytes, limit: Limit) -> None:
        self._links.notify(message, limit)

    def close(self) -> None:
        self._links.close()
        self._theirs.close()


def check_user(link: Link) -> None:
    """Raises TransferError if another user is at the other end."""
    if (uid := link.peer_uid()) != os.getuid():
        raise errors.TransferError(
            f"expected a process of our user {os.getuid()} at the other end, found user {uid}"
        )


def _connect(address: str, limit: Limit) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(limit.remaining_s())
    try:
        sock.connect("\0" + address)
    except (OSError, UnicodeError) as error:
        sock.close()
        raise errors.TransferError(f"cannot connect to the worker on this host: {error}") from error
    return Link(sock)
