"""Transfers by NIXL: for networks with RDMA, where the reader's card reads the pool without a processor.

It is used only where the user requests it. On one host `shm` is faster. Over plain TCP our own `tcp` is to be
preferred: UCX emulates reads there with the help of the peer's process, which it aborts if the reader has given up.
NIXL neither authenticates a peer nor encrypts; on loopback no other host can reach it.
"""

import base64
import itertools
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dynamo.base import errors, membership
from dynamo.transfer import api, memory, messages, routes
from dynamo.transfer.backends.nixl import endpoint, server
from dynamo.transfer.backends.nixl import messages as nixl_messages
from dynamo.transfer.job import TimeLimit
from dynamo.transfer.plan import Pattern, Piece

_STRETCH_BYTES = 64 * 2**20  # between two looks at the clock: a call may copy all it is given
_LOOK_S = 0.05


class NixlBackend:
    """The backend that listens where UCX does: on all interfaces, or on loopback alone, if that is `host`."""

    name = "nixl"
    capabilities = api.Capabilities(
        can_read=True, can_write=True, can_notify=True, is_same_host=False
    )

    def __init__(self, *, host: str = "127.0.0.1", is_insecure: bool = False) -> None:
        """Raises ConfigError for any host but loopback, unless `is_insecure`."""
        if membership.is_loopback(
            host
        ):  # UCX reads only the environment; the user's own value counts
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        elif not is_insecure:
            raise errors.ConfigError(
                f"NIXL on {host} asks for no token or certificate, so that whoever reaches it can use the KV cache:"
                " say --insecure if the network is yours, or leave nixl out of --kv-transfer-backends"
            )
        self._service: server.NixlServer | None = None
        self._exposed: routes.Exposed | None = None
        self._window: memory.Window | None = None

    def listen(self, exposed: routes.Exposed) -> str:
        self._exposed, self._window = exposed, memory.Window(exposed.region.memory)
        try:
            own = endpoint.NixlEndpoint(exposed.epoch, self._window)
            address = nixl_messages.Address(own.contact, self._window.address)
        except errors.TransferError as error:
            raise errors.ConfigError(f"NIXL cannot open this pool: {error}") from error
        self._service = server.NixlServer(own, exposed)
        return base64.b85encode(nixl_messages.encode(address)).decode()

    def connect(self, target: routes.PeerTarget, limit: TimeLimit) -> "NixlRoute":
        assert self._exposed is not None, "connect before listen"
        assert self._window is not None
        try:
            address = nixl_messages.decode_address(base64.b85decode(target.address))
        except ValueError as error:
            raise errors.TransferError(f"{target.name} has no NIXL address: {error}") from error
        route = NixlRoute(self._exposed.name, self._window, target, address)
        route.warm(limit)
        return route

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._window is not None:
            self._window.close()


class NixlRoute:
    """A route that does one operation after the other. After any failure the next operation has a new endpoint."""

    def __init__(
        self,
        name: str,
        window: memory.Window,
        target: routes.PeerTarget,
        address: nixl_messages.Address,
    ) -> None:
        self._name, self._window, self._target, self._address = name, window, target, address
        self._turn = threading.Lock()
        self._endpoint: endpoint.NixlEndpoint | None = None
        self._numbers = itertools.count(1)

    def warm(self, limit: TimeLimit) -> None:
        """Connect ahead of need. Raises TransferError."""
        with self._borrow(limit):
            pass

    def move(self, operation: api.TransferOperation, pattern: Pattern, limit: TimeLimit) -> None:
        with self._borrow(limit) as own:
            for stretch in stretches(pattern.pieces()):
                limit.remaining_s()
                own.move(operation, self._target.epoch, self._address.pool_at, stretch, limit)

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        with self._borrow(limit) as own:
            message_sent = nixl_messages.NixlNotify(
                next(self._numbers), message, limit.remaining_s()
            )
            own.send(self._target.epoch, nixl_messages.encode(message_sent))
            answer = self._receive(own, limit)
            while getattr(answer, "number", message_sent.number) != message_sent.number:
                answer = self._receive(own, limit)  # of an earlier notification that timed out
        if isinstance(answer, nixl_messages.NixlRefused):
            raise errors.TransferError(f"the peer refused: {answer.reason}")

    def close(self) -> None:
        with self._turn:
            if self._endpoint is not None:
                try:
                    self._endpoint.send(
                        self._target.epoch, nixl_messages.encode(nixl_messages.NixlBye())
                    )
                except errors.TransferError:  # the peer closed first
                    return
                finally:
                    self._end()

    @contextmanager
    def _borrow(self, limit: TimeLimit) -> Iterator[endpoint.NixlEndpoint]:
        while not self._turn.acquire(timeout=min(_LOOK_S, limit.remaining_s())):
            pass
        try:
            if self._endpoint is None:
                self._enter(limit)
            assert self._endpoint is not None
            yield self._endpoint
        except errors.RemoteProtocolError as error:
            self._end()
            raise errors.TransferError(f"the peer broke the protocol: {error}") from error
        except BaseException:
            self._end()
            raise
        finally:
            self._turn.release()

    def _enter(self, limit: TimeLimit) -> None:
        """Make a new endpoint and exchange greetings with the peer."""
        self._endpoint = endpoint.NixlEndpoint(f"{self._name}/{secrets.token_hex(8)}", self._window)
        try:
            self._greet(self._endpoint, limit)
        except errors.TransferError as error:
            raise errors.TransferError(
                f"cannot connect to {self._target.name} by NIXL: {error}"
            ) from error

    def _greet(self, own: endpoint.NixlEndpoint, limit: TimeLimit) -> None:
        if (name := own.add_peer(self._address.contact)) != self._target.epoch:
            raise errors.TransferError(f"that address is {name}'s")
        hello = nixl_messages.NixlHello(self._name, own.answer_contact)
        own.send(self._target.epoch, nixl_messages.encode(hello))
        if not isinstance(answer := self._receive(own, limit), nixl_messages.NixlWelcome):
            raise errors.RemoteProtocolError(f"expected a welcome, got {type(answer).__name__}")

    def _receive(self, own: endpoint.NixlEndpoint, limit: TimeLimit) -> nixl_messages.NixlMessage:
        """Return the peer's next message."""
        wait = endpoint.Wait(limit)
        while not (received := own.receive()):
            wait.pause()
        return nixl_messages.decode(received[0][1])

    def _end(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


def stretches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the copies in lists of bounded length and of bounded bytes, long ones divided."""
    stretch: list[Piece] = []
    room = _STRETCH_BYTES
    for piece in pieces:
        for local, remote, length in _divided(piece):
            if length > room or len(stretch) == messages.MAX_PIECES:
                yield stretch
                stretch, room = [], _STRETCH_BYTES
            stretch.append((local, remote, length))
            room -= length
    if stretch:
        yield stretch


def _divided(piece: Piece) -> Iterator[Piece]:
    local, remote, length = piece
    for offset in range(0, length, _STRETCH_BYTES):
        yield local + offset, remote + offset, min(_STRETCH_BYTES, length - offset)
