"""Transfers by NIXL: for networks with RDMA, where the reader's card reads the pool without a processor.

It is used only where the user requests it. On one host `shm` is faster. Over plain TCP our own `tcp` is to be
preferred: UCX emulates reads there with the help of the peer's process, which it aborts if the reader has given up.
NIXL neither authenticates a peer nor encrypts; on loopback no other host can reach it.

A `NixlEndpoint` is one agent of the library with its own UCX worker, used by one thread at a time. Each peer has an
endpoint of its own, because a transfer that has begun cannot be cancelled. Measured with nixl 1.5.1 over TCP: after
`release`, and after the peer was removed, the bytes of a stalled READ still came as soon as the peer went on, into
blocks that belonged to other sequences by then. Only the end of the UCX worker stops it for certain, so the worker of
a peer must not be that of another.

NIXL's own progress thread is left off: it spins, and costs a core that has nothing to do (0.5 to 0.9 CPU seconds a
second). A waiting thread makes the progress, and the server looks every millisecond. The server hands notifications to
the event loop by other threads, so that a busy loop stops no transfer.
"""

import base64
import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import nixl._api as nixl

from dynamo.base import errors, membership
from dynamo.transfer import api, memory, messages
from dynamo.transfer.api import MAX_DEADLINE_S, TimeLimit
from dynamo.transfer.plan import Pattern, Piece

log = logging.getLogger(__name__)
MAX_PEERS = 256
MAX_UNDELIVERED = 256  # notifications
_FAULTS: tuple[type[Exception], ...] = tuple(
    kind for name, kind in vars(nixl.nixlBind).items() if name.endswith("Error")
)
_STRETCH_BYTES = 64 * 2**20  # between two looks at the clock: a call may copy all it is given
_LOOK_S = 0.05
_SERVER_LOOK_S = 0.001
_JOIN_S = 5.0
_EAGER_S = 0.02  # of waiting, in which we look without a pause
_PAUSE_S = 0.0001
T = TypeVar("T")


class NixlEndpoint:
    """Opens one region of ours, and knows its peers. Every method raises TransferError if NIXL fails."""

    def __init__(self, name: str, window: memory.Window) -> None:
        library_log = logging.getLogger("nixl")  # by itself it writes to standard output
        library_log.handlers.clear()
        library_log.propagate = True
        library_log.setLevel(logging.WARNING)
        self._window = window
        self._handle: Any = None  # here and in no frame, because a traceback would keep it alive
        self._agent: Any = None
        self._call(lambda: self._open(name))

    @property
    def contact(self) -> bytes:
        """The address of this endpoint, with the keys of its region."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    @property
    def answer_contact(self) -> bytes:
        """The address of this endpoint, without keys that open memory."""
        nothing = self._call(lambda: nixl.nixlBind.nixlRegDList(nixl.nixlBind.DRAM_SEG))
        partial = self._call(
            lambda: self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        )
        return bytes(partial)

    def add_peer(self, contact: bytes) -> str:
        """Add a peer by its address; return its name."""
        named = self._call(lambda: self._agent.add_remote_agent(contact))
        return named.decode() if isinstance(named, bytes) else str(named)

    def remove_peer(self, peer: str) -> None:
        """Close the connection to a peer."""
        self._call(lambda: self._agent.remove_remote_agent(peer))

    def send(self, peer: str, message: bytes) -> None:
        """Send a notification, without waiting for it to arrive."""
        self._call(lambda: self._agent.send_notif(peer, message))

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the notifications since the last call, and let other operations progress."""
        by_peer = self._call(lambda: self._agent.get_new_notifs())
        return [(peer, bytes(each)) for peer, bodies in by_peer.items() for each in bodies]

    def move(
        self,
        operation: api.TransferOperation,
        peer: str,
        pool_at: int,
        pieces: Sequence[Piece],
        limit: TimeLimit,
    ) -> None:
        """Copy these pieces. After an error or at the time limit, bytes may still arrive until `close`."""
        local_parts = [(self._window.address + local, length, 0) for local, _, length in pieces]
        remote_parts = [(pool_at + remote, length, 0) for _, remote, length in pieces]
        self._handle = self._call(lambda: self._begin(operation, peer, local_parts, remote_parts))
        state = self._call(lambda: self._agent.transfer(self._handle))
        wait = Wait(limit)
        while state == "PROC":
            wait.pause()
            state = self._call(lambda: self._agent.check_xfer_state(self._handle))
        if state != "DONE":
            raise errors.TransferError(f"NIXL could not move the bytes: {state}")
        self._call(self._handle.release)
        self._handle = None

    def close(self) -> None:
        """End the UCX worker, and with it whatever still moves. Idempotent; never raises."""
        if self._handle is not None:
            self._handle._released = True  # otherwise its release waits in vain, and logs that
            self._handle._agent = None
            self._handle = None
        if self._agent is not None:
            self._agent.agent = None  # whatever frames hold of Python's side, NIXL's ends here
            self._agent = None

    def _open(self, name: str) -> None:
        agent_config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(name, agent_config)
        self._agent.create_backend("UCX")
        region = [(self._window.address, len(self._window.view), 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(region, "DRAM"))

    def _begin(
        self,
        operation: api.TransferOperation,
        peer: str,
        local_parts: list[tuple[int, int, int]],
        remote_parts: list[tuple[int, int, int]],
    ) -> Any:
        local, remote = (
            self._agent.get_xfer_descs(side, "DRAM") for side in (local_parts, remote_parts)
        )
        return self._agent.initialize_xfer(operation.name, local, remote, peer)

    @staticmethod
    def _call(function: Callable[[], T]) -> T:
        try:
            return function()
        except _FAULTS as error:
            raise errors.TransferError(f"NIXL: {error}") from error


class Wait:
    """A polling loop under a time limit: without pauses for a while, then with them."""

    def __init__(self, limit: TimeLimit) -> None:
        self._limit, self._is_eager_until = limit, time.monotonic() + _EAGER_S

    def pause(self) -> None:
        """Pause before the next poll. Raises TransferError at the time limit."""
        self._limit.remaining_s()
        time.sleep(_PAUSE_S if time.monotonic() > self._is_eager_until else 0)


class NixlBackend:
    """The backend that listens where UCX does: on all interfaces, or on loopback alone, if that is `host`."""

    name = "nixl"
    is_same_host = False

    def __init__(self, *, host: str = "127.0.0.1", is_insecure: bool = False) -> None:
        """Raises ConfigError for any host but loopback, unless `is_insecure`."""
        # UCX reads only the environment; the user's own value counts
        if membership.is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        elif not is_insecure:
            raise errors.ConfigError(
                f"NIXL on {host} asks for no token or certificate, so that whoever reaches it can use the KV cache:"
                " say --insecure if the network is yours, or leave nixl out of --kv-transfer-backends"
            )
        self._service: NixlServer | None = None
        self._exposed: api.Exposed | None = None
        self._window: memory.Window | None = None

    def listen(self, exposed: api.Exposed) -> str:
        self._exposed, self._window = exposed, memory.Window(exposed.region.memory)
        try:
            own = NixlEndpoint(exposed.epoch, self._window)
            address = messages.Address(own.contact, self._window.address)
        except errors.TransferError as error:
            raise errors.ConfigError(f"NIXL cannot open this pool: {error}") from error
        self._service = NixlServer(own, exposed)
        return base64.b85encode(messages.encode(address)).decode()

    def connect(self, target: api.PeerTarget, limit: TimeLimit) -> "NixlRoute":
        assert self._exposed is not None, "connect before listen"
        assert self._window is not None
        try:
            address = messages.decode_address(base64.b85decode(target.address))
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
        self, name: str, window: memory.Window, target: api.PeerTarget, address: messages.Address
    ) -> None:
        self._name, self._window, self._target, self._address = name, window, target, address
        self._turn = threading.Lock()
        self._endpoint: NixlEndpoint | None = None
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

    def probe(self, num_bytes: int, limit: TimeLimit) -> None:
        """Do nothing: NIXL writes to registered memory only, and all of ours is in use."""

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        with self._borrow(limit) as own:
            message_sent = messages.NixlNotify(next(self._numbers), message, limit.remaining_s())
            own.send(self._target.epoch, messages.encode(message_sent))
            answer = self._receive(own, limit)
            while getattr(answer, "number", message_sent.number) != message_sent.number:
                answer = self._receive(own, limit)  # of an earlier notification that timed out
        if isinstance(answer, messages.NixlRefused):
            raise errors.TransferError(f"the peer refused: {answer.reason}")

    def close(self) -> None:
        with self._turn:
            if self._endpoint is not None:
                try:
                    self._endpoint.send(self._target.epoch, messages.encode(messages.NixlBye()))
                except errors.TransferError:  # the peer closed first
                    return
                finally:
                    self._end()

    @contextmanager
    def _borrow(self, limit: TimeLimit) -> Iterator[NixlEndpoint]:
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
        self._endpoint = NixlEndpoint(f"{self._name}/{secrets.token_hex(8)}", self._window)
        try:
            self._greet(self._endpoint, limit)
        except errors.TransferError as error:
            raise errors.TransferError(
                f"cannot connect to {self._target.name} by NIXL: {error}"
            ) from error

    def _greet(self, own: NixlEndpoint, limit: TimeLimit) -> None:
        if (name := own.add_peer(self._address.contact)) != self._target.epoch:
            raise errors.TransferError(f"that address is {name}'s")
        hello = messages.NixlHello(self._name, own.answer_contact)
        own.send(self._target.epoch, messages.encode(hello))
        if not isinstance(answer := self._receive(own, limit), messages.NixlWelcome):
            raise errors.RemoteProtocolError(f"expected a welcome, got {type(answer).__name__}")

    def _receive(self, own: NixlEndpoint, limit: TimeLimit) -> messages.NixlMessage:
        """Return the peer's next message."""
        wait = Wait(limit)
        while not (received := own.receive()):
            wait.pause()
        return messages.decode(received[0][1])

    def _end(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


class NixlServer:
    """Serves from construction to `close`, and owns the endpoint."""

    def __init__(self, endpoint: NixlEndpoint, exposed: api.Exposed) -> None:
        self._endpoint, self._exposed = endpoint, exposed
        self._names: OrderedDict[str, str] = OrderedDict()  # the names that peers gave themselves
        self._answers: queue.SimpleQueue[tuple[str, messages.NixlMessage]] = queue.SimpleQueue()
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._deliverers = ThreadPoolExecutor(4, "transfer-nixl-deliver")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="transfer-nixl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and close the endpoint. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)
        self._deliverers.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        while not self._closed.wait(_SERVER_LOOK_S):
            try:
                self._turn()
            except errors.TransferError as error:
                log.warning("%s cannot receive from its NIXL peers: %s", self._exposed.name, error)
                time.sleep(1.0)
        self._endpoint.close()

    def _turn(self) -> None:
        for peer, body in self._endpoint.receive():
            try:
                match messages.decode(body):
                    case messages.NixlHello() as hello:
                        self._admit(peer, hello)
                    case messages.NixlNotify() as notification:
                        self._accept_notification(peer, notification)
                    case messages.NixlBye():
                        self._forget(peer)
                    case _:
                        log.debug("%s sent an answer without a request", peer)
            except errors.DynamoError as error:
                log.warning("ignored a message of %s to %s: %s", peer, self._exposed.name, error)
        while not self._answers.empty():
            self._send(*self._answers.get())

    def _admit(self, peer: str, hello: messages.NixlHello) -> None:
        if (name := self._endpoint.add_peer(hello.contact)) != peer:
            self._endpoint.remove_peer(name)
            raise errors.RemoteProtocolError(f"{peer} gave the address of {name}")
        self._names[peer] = hello.name
        if len(self._names) > MAX_PEERS:
            self._forget(next(iter(self._names)))
        self._send(peer, messages.NixlWelcome())

    def _forget(self, peer: str) -> None:
        if self._names.pop(peer, None) is not None:
            self._endpoint.remove_peer(peer)

    def _accept_notification(self, peer: str, message: messages.NixlNotify) -> None:
        if peer not in self._names:
            return  # it did not say hello, so it cannot be answered
        if not self._undelivered.acquire(blocking=False):
            self._send(peer, messages.NixlRefused(message.number, "too many notifications at once"))
            return
        self._deliverers.submit(self._deliver, peer, self._names[peer], message)

    def _deliver(self, peer: str, name: str, message: messages.NixlNotify) -> None:
        try:
            limit = TimeLimit(min(max(message.timeout_s, 0.001), MAX_DEADLINE_S))
            self._exposed.deliver(name, message.message, limit)
        except errors.DynamoError as error:
            self._answers.put((peer, messages.NixlRefused(message.number, str(error))))
        else:
            self._answers.put((peer, messages.NixlHeard(message.number)))
        finally:
            self._undelivered.release()

    def _send(self, peer: str, message: messages.NixlMessage) -> None:
        try:
            self._endpoint.send(peer, messages.encode(message))
        except errors.TransferError as error:  # the peer has gone, and waits for nothing
            log.debug("%s cannot be reached from %s: %s", peer, self._exposed.name, error)
            self._forget(peer)


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
