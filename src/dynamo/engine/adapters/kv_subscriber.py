"""The subscriber to the KV events that a vLLM or an SGLang publishes over ZeroMQ; both have the same publisher.

By default the subscriber binds and the publishers connect (vLLM connects to an endpoint without `*`): so the port is on
loopback, is ours before the engine starts, and the connection stands long before the first block. The publisher keeps
its latest batches for replay, at an endpoint of its own. If the user has configured the publisher, the subscriber
connects to where it binds.

One thread receives and translates batches, hands them to the event loop, and receives more only when the loop has taken
them. So further batches wait in ZeroMQ with its bounded queue, and batches that do not fit there are replayed.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from dynamo.base import errors
from dynamo.engine.adapters import kv_events as engine_events
from dynamo.protocols import kv_events
from dynamo.runtime import listening

HIGH_WATER = 10_000  # batches that ZeroMQ queues for us
MESSAGE_LIMIT = 64 << 20  # bytes
REPLAY_TIMEOUT_S = 2.0
_MAX_BATCHES = 1_000  # handed to the event loop at once
_NUM_FRAMES = 3  # topic, number, batch
_NUMBER_BYTES = 8
_REPLAY_END = b"\xff" * _NUMBER_BYTES
_logger = logging.getLogger(__name__)
OnKvEvents = Callable[[Sequence[kv_events.KvEvent], int], None]  # events, data-parallel rank
_Received = list[tuple[Sequence[kv_events.KvEvent], int]]
_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherEndpoints:
    """The endpoints of the publisher of rank 0; the other ranks use the next ports."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    @classmethod
    def on_free_ports(
        cls, num_ranks: int, reservations: contextlib.ExitStack
    ) -> "PublisherEndpoints":
        """Return endpoints on free loopback ports, kept until `reservations` is closed. Raises ConfigError."""
        first, first_replay = (listening.reserve_ports(num_ranks, reservations) for _ in range(2))
        return cls(
            endpoint=f"tcp://127.0.0.1:{first}", replay_endpoint=f"tcp://127.0.0.1:{first_replay}"
        )


class ZmqKvSubscriber:
    """Made before the engine starts, started when its block size is known, closed after the engine."""

    def __init__(
        self, endpoints: PublisherEndpoints, num_ranks: int, *, is_bound: bool = False
    ) -> None:
        """Bind or connect one socket for each rank; `is_bound`: the publishers bind in any case. Raises ConfigError."""
        self._endpoints, self._is_bound = endpoints, is_bound
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._sockets = [self._subscribe(rank) for rank in range(num_ranks)]
        self._wake_sender = self._context.socket(zmq.PAIR)
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_sender.bind("inproc://wake")
        self._wake_receiver.connect("inproc://wake")
        self._is_delivered = threading.Event()
        self._is_running = True
        self._ranks: dict[_Socket, engine_events.RankBatches] = {}
        self._thread: threading.Thread | None = None

    @property
    def num_dropped(self) -> int:
        """Return the number of stored blocks without a computable hash, over all ranks."""
        return sum(rank.num_dropped for rank in self._ranks.values())

    @property
    def num_gaps(self) -> int:
        """Return how often batches were lost and all blocks of a rank were cleared."""
        return sum(rank.num_gaps for rank in self._ranks.values())

    def start(self, block_size: int, on_kv_events: OnKvEvents) -> None:
        """Start the thread, which makes the running event loop call `on_kv_events`."""
        replay_endpoint = self._endpoints.replay_endpoint
        for rank, socket in enumerate(self._sockets):
            replay = None
            if replay_endpoint:
                replay = functools.partial(self._replay, endpoint_of_rank(replay_endpoint, rank))
            translator = engine_events.EventTranslator(block_size)
            self._ranks[socket] = engine_events.RankBatches(translator, replay)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._run, args=(loop, on_kv_events), name="KV events", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """End the thread and close the sockets. Idempotent."""
        if not self._is_running:
            return
        self._is_running = False
        self._wake_sender.send(b"")
        self._is_delivered.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._context.destroy(linger=0)

    def _subscribe(self, rank: int) -> _Socket:
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, HIGH_WATER)
        socket.set(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
        socket.subscribe(self._endpoints.topic)
        endpoint = endpoint_of_rank(self._endpoints.endpoint, rank)
        try:
            if self._is_bound or is_bound_by_publisher(endpoint):
                socket.connect(connectable(endpoint))
            else:
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise errors.ConfigError(
                f"cannot subscribe to KV events at {endpoint!r}: {error}"
            ) from error
        return socket

    def _run(self, loop: asyncio.AbstractEventLoop, on_kv_events: OnKvEvents) -> None:
        """Receive until closed; the thread's main function."""
        poller = zmq.Poller()
        for socket in (*self._sockets, self._wake_receiver):
            poller.register(socket, zmq.POLLIN)
        while self._is_running:
            ready = [socket for socket, _ in poller.poll() if socket in self._ranks]
            received = [batch for socket in ready for batch in self._receive(socket)]
            self._is_delivered.clear()
            if received and self._is_running:
                loop.call_soon_threadsafe(self._deliver, on_kv_events, received)
                self._is_delivered.wait()

    def _deliver(self, on_kv_events: OnKvEvents, received: _Received) -> None:
        """Deliver on the event loop, and let the thread go on."""
        try:
            for events, dp_rank in received:
                on_kv_events(events, dp_rank)
        finally:
            self._is_delivered.set()

    def _receive(self, socket: _Socket) -> Iterator[tuple[Sequence[kv_events.KvEvent], int]]:
        rank = self._ranks[socket]
        former_counts = rank.num_dropped, rank.num_gaps
        for number, payload in _batches(socket):
            if events := rank.receive(number, payload):
                yield events, rank.dp_rank
        if (rank.num_dropped, rank.num_gaps) != former_counts:
            _logger.warning(
                "KV events of rank %d so far: %d blocks dropped without a hash, %d gaps after which all were cleared",
                rank.dp_rank, rank.num_dropped, rank.num_gaps,
            )  # fmt: skip

    def _replay(self, endpoint: str, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches that the publisher still has from this number on; ends early when it cannot be asked."""
        dealer: _Socket | None = None
        try:
            dealer = self._context.socket(zmq.DEALER)
            dealer.connect(connectable(endpoint))
            dealer.send_multipart((b"", first.to_bytes(_NUMBER_BYTES, "big")))
            deadline = time.monotonic() + REPLAY_TIMEOUT_S
            while dealer.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                frames = dealer.recv_multipart()
                if len(frames) < 2 or frames[-2] == _REPLAY_END:
                    break
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        except zmq.ZMQError as error:  # as where no file is left; it would end the thread
            _logger.warning("KV events that were missed are lost: %s: %s", endpoint, error)
        finally:
            if dealer is not None:
                dealer.close(linger=0)


def _batches(socket: _Socket) -> Iterator[tuple[int, bytes]]:
    """Yield the batches that have arrived with their numbers, at most _MAX_BATCHES."""
    for _ in range(_MAX_BATCHES):
        if not socket.poll(0):
            return
        frames = socket.recv_multipart()
        if len(frames) == _NUM_FRAMES:
            yield int.from_bytes(frames[1], "big"), frames[2]


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of the publisher of this rank, as vLLM computes it. Raises ConfigError."""
    if rank == 0:
        return endpoint
    scheme, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise errors.ConfigError(
            f"KV events of several ranks: expected an endpoint tcp://HOST:PORT, got {endpoint!r}"
        )
    return f"{scheme}:{int(port) + rank}"


def is_bound_by_publisher(endpoint: str) -> bool:
    """Return whether the publisher binds this endpoint, so that the subscriber must connect."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def connectable(endpoint: str) -> str:
    """Return the address to connect to on this host for an endpoint that was bound to a wildcard."""
    return endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
