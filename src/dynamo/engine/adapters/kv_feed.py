"""Hears the KV events of a vLLM, or of an SGLang, whose publisher is the same, in this process's care.

By default we bind and vLLM's publishers connect (an endpoint without `*` tells them to): so the port is on loopback,
is ours before vLLM starts, and the connection stands long before the first block. vLLM keeps its latest batches for
whoever missed some, at an endpoint of its own. A user's own `--kv-events-config` is heeded: then we connect to where
it binds.

One thread receives, translates and brings what came to the event loop as one batch; it takes the next only when the
loop has taken that one. So what does not fit waits in zmq, whose queue is bounded, and what does not fit there is
replayed.
"""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from dynamo.base import errors
from dynamo.engine.adapters import kv_events as translation
from dynamo.engine.adapters import ports
from dynamo.protocols import kv_events

HIGH_WATER = 10_000  # batches that wait for us
MESSAGE_LIMIT = 64 << 20  # bytes
REPLAY_S = 2.0
_TURN_LIMIT = 1_000  # batches in one turn
_NUM_FRAMES = 3  # topic, number, batch
_NUMBER_BYTES = 8
_END = b"\xff" * _NUMBER_BYTES
_logger = logging.getLogger(__name__)
Deliver = Callable[[Sequence[kv_events.KvEvent], int], None]
_Told = list[tuple[Sequence[kv_events.KvEvent], int]]
_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Of the publisher of rank 0; the other ranks' are at the next ports."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    @classmethod
    def free(cls, num_ranks: int) -> "Endpoints":
        """Free ports on loopback."""
        first, first_replay = ports.free_run(num_ranks), ports.free_run(num_ranks)
        return cls(
            endpoint=f"tcp://127.0.0.1:{first}", replay_endpoint=f"tcp://127.0.0.1:{first_replay}"
        )


class KvFeed:
    """Opened before vLLM starts, started when its block size is known, closed after it."""

    def __init__(self, endpoints: Endpoints, num_ranks: int) -> None:
        """Raises ConfigError if it cannot listen there."""
        self._endpoints = endpoints
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._sockets = [self._subscribe(rank) for rank in range(num_ranks)]
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        self._is_taken = threading.Event()
        self._is_running = True
        self._ranks: dict[_Socket, translation.RankEvents] = {}
        self._thread: threading.Thread | None = None

    @property
    def num_dropped(self) -> int:
        """Blocks that could not be placed, of all ranks."""
        return sum(rank.num_dropped for rank in self._ranks.values())

    @property
    def num_holes(self) -> int:
        """How often something was missed for good, and all was forgotten."""
        return sum(rank.num_holes for rank in self._ranks.values())

    def start(self, block_size: int, deliver: Deliver) -> None:
        """From now on call `deliver` on this event loop, with events and their rank."""
        for rank, heard in enumerate(self._sockets):
            replay = self._endpoints.replay_endpoint
            self._ranks[heard] = translation.RankEvents(
                translation.Translator(block_size),
                functools.partial(self._missed, at_rank(replay, rank)) if replay else None,
            )
        bring = functools.partial(self._bring, asyncio.get_running_loop(), deliver)
        self._thread = threading.Thread(
            target=self._run, args=(bring,), name="KV events", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """Hear no more. Idempotent."""
        if not self._is_running:
            return
        self._is_running = False
        self._wake.send(b"")
        self._is_taken.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._context.destroy(linger=0)

    def _subscribe(self, rank: int) -> _Socket:
        heard = self._context.socket(zmq.SUB)
        heard.set(zmq.RCVHWM, HIGH_WATER)
        heard.set(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
        heard.subscribe(self._endpoints.topic)
        endpoint = at_rank(self._endpoints.endpoint, rank)
        try:
            if is_bound_by_them(endpoint):
                heard.connect(reachable(endpoint))
            else:
                heard.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise errors.ConfigError(f"cannot hear KV events at {endpoint!r}: {error}") from error
        return heard

    def _run(self, bring: Callable[[_Told], None]) -> None:
        """The thread. What follows is called by it only."""
        poller = zmq.Poller()
        for heard in (*self._sockets, self._woken):
            poller.register(heard, zmq.POLLIN)
        while self._is_running:
            ready = [heard for heard, _ in poller.poll() if heard in self._ranks]
            told = [piece for heard in ready for piece in self._receive(heard)]
            if told:
                bring(told)

    def _bring(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, told: _Told) -> None:
        self._is_taken.clear()
        if self._is_running:
            loop.call_soon_threadsafe(self._hand_over, deliver, told)
            self._is_taken.wait()

    def _hand_over(self, deliver: Deliver, told: _Told) -> None:
        """On the loop."""
        try:
            for events, dp_rank in told:
                deliver(events, dp_rank)
        finally:
            self._is_taken.set()

    def _receive(self, heard: _Socket) -> Iterator[tuple[Sequence[kv_events.KvEvent], int]]:
        rank = self._ranks[heard]
        counted = rank.num_dropped, rank.num_holes
        for number, payload in _batches(heard):
            if events := rank.take(number, payload):
                yield events, rank.dp_rank
        if (rank.num_dropped, rank.num_holes) != counted:
            _logger.warning(
                "KV events of rank %d so far: %d blocks had no place, and %d times events were lost and all forgotten",
                rank.dp_rank, rank.num_dropped, rank.num_holes,
            )  # fmt: skip

    def _missed(self, endpoint: str, first: int) -> Iterator[tuple[int, bytes]]:
        """What vLLM still has from this number on; ends early when it does not answer."""
        asked = self._context.socket(zmq.DEALER)
        try:
            asked.connect(reachable(endpoint))
            asked.send_multipart((b"", first.to_bytes(_NUMBER_BYTES, "big")))
            until = time.monotonic() + REPLAY_S
            while asked.poll(max(0, round((until - time.monotonic()) * 1000))):
                frames = asked.recv_multipart()
                if len(frames) < 2 or frames[-2] == _END:
                    break
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        finally:
            asked.close(linger=0)


def _batches(heard: _Socket) -> Iterator[tuple[int, bytes]]:
    """What has come, with its numbers; no more than a turn may take."""
    for _ in range(_TURN_LIMIT):
        if not heard.poll(0):
            return
        frames = heard.recv_multipart()
        if len(frames) == _NUM_FRAMES:
            yield int.from_bytes(frames[1], "big"), frames[2]


def at_rank(endpoint: str, rank: int) -> str:
    """Where the publisher of this rank is, as vLLM reckons. Raises ConfigError."""
    if rank == 0:
        return endpoint
    scheme, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise errors.ConfigError(
            f"KV events of several ranks: expected an endpoint tcp://HOST:PORT, got {endpoint!r}"
        )
    return f"{scheme}:{int(port) + rank}"


def is_bound_by_them(endpoint: str) -> bool:
    """Does vLLM listen there (then we connect), or connect there?"""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def reachable(endpoint: str) -> str:
    """Where to connect to what was bound so, on this host."""
    return endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
