"""Transfers to another host: the server sends from its pool, the client receives into its own, without another copy.

An address is `host:port`. Loopback needs no credentials; any other address needs a cluster token or certificates at
both ends (`handshake`).
"""

import functools
import itertools
import socket

from dynamo.base import addresses, errors, membership
from dynamo.runtime import listening
from dynamo.runtime.backends import tcp as request_plane
from dynamo.transfer import api, messages, server
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import Link, TlsLink, enter, new_authenticator
from dynamo.transfer.link_pool import LinkPool
from dynamo.transfer.plan import Pattern, Piece

_ANY_ADDRESS = listening.ListenAddress(setting="DYN_KV_TRANSFER_")
# On loopback, where no bytes are on their way, a short send buffer lets the kernel use the same pages again while they
# are in the cache. Left alone it grows to megabytes, and 2 MiB cost up to twice the CPU. (The kernel doubles this.)
_LOOPBACK_SEND_BYTES = 256 * 1024
# The kernel repeats a lost attempt to connect after 1, 3 and 7 s: a host that comes back between is found by a new one.
_ATTEMPT_S = 1.0


class TcpBackend:
    """The backend that listens on one host, at the first free one of its ports."""

    name = "tcp"
    is_same_host = False

    def __init__(
        self,
        *,
        listen_address: listening.ListenAddress = _ANY_ADDRESS,
        credentials: membership.Credentials = membership.NO_CREDENTIALS,
        is_always_summed: bool = False,
    ) -> None:
        """`is_always_summed`: send checksums on loopback, too, as for tunnels that end there.

        Raises ConfigError for a host that peers cannot connect to, or one that is open without credentials.
        """
        self._address, self._credentials = listen_address.checked(), credentials
        for host in self._address.hosts:
            membership.check_address(
                host, "transfers of KV blocks (--kv-transfer-host)", credentials
            )
        self._authenticator = new_authenticator(credentials)
        self._is_always_summed = is_always_summed
        self._service: server.TransferServer | None = None
        self._exposed: api.Exposed | None = None

    def listen(self, exposed: api.Exposed) -> str:
        sock = self._address.listen()
        _tune(sock, self._address.host)  # accepted sockets inherit it
        self._exposed = exposed
        make_link = functools.partial(self._link, is_server=True)
        self._service = server.TransferServer(
            sock, exposed, authenticator=self._authenticator, make_link=make_link
        )
        return self._address.published(sock.getsockname()[1])

    def connect(self, target: api.PeerTarget, limit: TimeLimit) -> "TcpRoute":
        assert self._exposed is not None, "connect before listen"
        try:
            host, port = addresses.split(target.address)
        except ValueError as error:
            raise errors.TransferError(f"the address of {target.name}: {error}") from error
        if self._is_open and not membership.is_loopback(host):
            raise errors.TransferError(
                f"{target.name} is on another host ({host}), which needs a cluster token, and we have none"
            )
        own = self._exposed
        greet = functools.partial(
            enter, name=own.name, epoch=target.epoch, authenticator=self._authenticator
        )
        make_link = functools.partial(self._link, is_server=False)
        links = LinkPool(lambda limit: _connect(host, port, limit, make_link), greet)
        try:
            links.warm(limit)
        except errors.TransferError as error:
            named = str(error).replace("the peer", f"the worker at {target.address}", 1)
            raise errors.TransferError(named) from error
        is_bare = self._authenticator.tls is None and not membership.is_loopback(host)
        is_summed = self._is_always_summed or is_bare
        return TcpRoute(own.region.memory, links, is_summed=is_summed)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    @property
    def _is_open(self) -> bool:
        own = self._credentials.current()
        return not own.has_cluster_token and own.tls is None and not own.is_insecure

    def _link(self, sock: socket.socket, *, is_server: bool) -> Link:
        if (tls := self._authenticator.tls) is None:  # as its files are now
            return Link(sock)
        context = tls.server if is_server else tls.client
        return TlsLink(sock, context, is_server=is_server)


class TcpRoute:
    """A route in which each thread that moves blocks has a connection of its own."""

    def __init__(self, memory: memoryview, links: LinkPool, *, is_summed: bool) -> None:
        self._memory, self._links, self._is_summed = memory, links, is_summed

    def move(self, operation: api.TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
        step = self._pull if operation is api.TransferOperation.READ else self._push
        with self._links.borrow(limit) as link:
            pieces = pattern.pieces()
            while batch := list(itertools.islice(pieces, messages.MAX_PIECES)):
                step(link, batch, limit)

    def probe(self, num_bytes: int, limit: TimeLimit) -> None:
        dropped = memoryview(bytearray(num_bytes))
        to_nowhere = TcpRoute(dropped, self._links, is_summed=self._is_summed)
        with self._links.borrow(limit) as link:
            to_nowhere._pull(link, [(0, 0, num_bytes)], limit)

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        self._links.notify(message, limit)

    def close(self) -> None:
        self._links.close()

    def _pull(self, link: Link, batch: list[Piece], limit: TimeLimit) -> None:
        link.send(messages.Read(_remote(batch), self._is_summed, limit.remaining_s()), limit)
        link.receive(
            messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES, is_copy=True
        )
        link.receive_spans(self._memory, _local(batch), limit, is_summed=self._is_summed)

    def _push(self, link: Link, batch: list[Piece], limit: TimeLimit) -> None:
        request = messages.Write(_remote(batch), self._is_summed, limit.remaining_s())
        link.send(request, limit, is_more=True)
        link.send_spans(self._memory, _local(batch), limit, is_summed=self._is_summed)
        link.receive(messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)


def _local(batch: list[Piece]) -> list[messages.Span]:
    return [(local, length) for local, _, length in batch]


def _remote(batch: list[Piece]) -> bytes:
    return messages.pack([(remote, length) for _, remote, length in batch])


def _connect(host: str, port: int, limit: TimeLimit, make_link: server.MakeLink) -> Link:
    try:
        sock = _open_socket(host, port, limit)
    except OSError as error:
        raise errors.TransferError(
            f"cannot connect to the worker at {addresses.join(host, port)}: {error}"
        ) from error
    try:
        _tune(sock, host)
        return make_link(sock)
    except OSError as error:
        sock.close()
        raise errors.TransferError(
            f"the worker at {addresses.join(host, port)} closed the connection at once: {error}"
        ) from error


def _open_socket(host: str, port: int, limit: TimeLimit) -> socket.socket:
    while True:
        remaining_s = limit.remaining_s()
        try:
            return socket.create_connection((host, port), timeout=min(remaining_s, _ATTEMPT_S))
        except TimeoutError:
            if remaining_s <= _ATTEMPT_S:
                raise


def _tune(sock: socket.socket, host: str) -> None:
    request_plane.notice_dead_peers(sock)
    if membership.is_loopback(host):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
