"""The receiving end of the event plane over ZeroMQ: one SUB socket, and the thread that reads it.

zmq's own asyncio sockets cost more per message than all else here. The thread hands over what has come as one batch,
and takes the next only when the loop has taken that one. So a busy loop gets large batches, and what does not fit waits
in zmq's bounded queues, not here. The loop talks to it through a queue of commands and a socket to wake it.
"""

import asyncio
import collections
import contextlib
import logging
import struct
import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from dynamo.runtime.events import Event

HIGH_WATER = 10_000  # messages that wait for one slow listener before it misses some
PAYLOAD_LIMIT = 16 << 20
HANDSHAKE_MS = 5_000
U64 = struct.Struct(">Q")
_FRAME_LIMIT = PAYLOAD_LIMIT + 1024
_BATCH_LIMIT = 1_000
HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

log = logging.getLogger(__name__)


class EventReceiver:
    """The SUB socket and its thread. The methods without a note are for the loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Callable[[list[Event]], None],
        secret: bytes | None,
    ) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._uses_by_address: collections.Counter[str] = collections.Counter()
        self._commands: collections.deque[Callable[[], object]] = collections.deque()
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind(f"inproc://wake-{id(self)}")
        self._woken = context.socket(zmq.PAIR)
        self._woken.connect(f"inproc://wake-{id(self)}")
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, _FRAME_LIMIT)
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._failures: zmq.Socket[bytes] | None = None  # of handshakes
        if secret is not None:
            self._encrypt(secret)
        self._topic_by_name: dict[bytes, str] = {}
        self._refused: set[str] = set()  # publishers that failed the handshake
        self._early: collections.deque[list[bytes]] = collections.deque()  # see `_leave`
        self._is_waiting = False  # for `resume`
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="event receiver", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str) -> None:
        self._do(lambda: self._hear(topic))

    def unsubscribe(self, topic: str) -> None:
        self._do(lambda: self._ignore(topic))

    def connect(self, address: str) -> None:
        self._uses_by_address[address] += 1
        if self._uses_by_address[address] == 1:
            self._do(lambda: self._socket.connect(address))

    def disconnect(self, address: str) -> None:
        self._uses_by_address[address] -= 1
        if not self._uses_by_address[address]:
            del self._uses_by_address[address]
            self._do(lambda: self._leave(address))

    def _encrypt(self, secret: bytes) -> None:
        public, own_secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(secret))
        self._socket.set(zmq.CURVE_PUBLICKEY, public)
        self._socket.set(zmq.CURVE_SECRETKEY, own_secret)
        self._failures = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)

    def resume(self) -> None:
        """The batch has been taken; bring the next."""
        self._do(self._resume)

    async def close(self) -> None:
        self._do(self._end)
        await asyncio.to_thread(self._thread.join)
        self._wake.close()

    def _do(self, command: Callable[[], object]) -> None:
        """Have the thread do it."""
        if self._is_running:
            self._commands.append(command)
            with contextlib.suppress(zmq.Again):  # so many wakes wait that one more is not needed
                self._wake.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        """The thread. What follows is called by it only."""
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        if self._failures is not None:
            self._poller.register(self._failures, zmq.POLLIN)
        while self._is_running:
            ready = dict(self._poller.poll())
            if self._woken in ready:
                self._obey()
                if self._early and not self._is_waiting:
                    self._hand_over()
            elif self._socket in ready:
                self._hand_over()
            elif self._failures is not None:
                self._tell_failure(self._failures)
        self._woken.close()
        if self._failures is not None:
            self._socket.disable_monitor()
            self._failures.close()
        self._socket.close()

    def _obey(self) -> None:
        self._woken.recv()
        while self._commands:
            try:
                self._commands.popleft()()
            except zmq.ZMQError as error:
                log.warning("event plane: %s", error)

    def _tell_failure(self, failures: zmq.Socket[bytes]) -> None:
        """Once for each publisher: zmq tries again for as long as we listen."""
        address = parse_monitor_message(failures.recv_multipart())["endpoint"].decode()
        if address not in self._refused:
            self._refused.add(address)
            log.warning(
                "event plane: the publisher at %s has another cluster token, or none; give every process the same"
                " (--cluster-token-file)",
                address,
            )

    def _hand_over(self) -> None:
        """Bring what has come to the loop, and wait for `resume` before bringing more."""
        batch: list[Event] = []
        num_malformed = 0
        for _ in range(_BATCH_LIMIT):
            try:
                frames = self._next()
            except zmq.Again:
                break
            if not _is_well_formed(frames):
                num_malformed += 1
            elif frames[0] in self._topic_by_name:  # zmq also lets through what only begins like it
                batch.append(self._event(frames))
        if num_malformed:
            log.warning("dropped %d malformed event messages", num_malformed)
        if batch:
            self._is_waiting = True
            self._poller.modify(self._socket, 0)
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _event(self, frames: list[bytes]) -> Event:
        name, number, publisher, payload = frames
        return Event(
            topic=self._topic_by_name[name],
            publisher=U64.unpack(publisher)[0],
            number=U64.unpack(number)[0],
            payload=payload,
        )

    def _hear(self, topic: str) -> None:
        self._topic_by_name[topic.encode()] = topic
        self._socket.subscribe(topic)

    def _ignore(self, topic: str) -> None:
        del self._topic_by_name[topic.encode()]
        self._socket.unsubscribe(topic)

    def _next(self) -> list[bytes]:
        """A message. Raises zmq.Again."""
        return self._early.popleft() if self._early else self._socket.recv_multipart(zmq.NOBLOCK)

    def _resume(self) -> None:
        self._is_waiting = False
        self._poller.modify(self._socket, zmq.POLLIN)

    def _leave(self, address: str) -> None:
        """Polling has begun to read a message: if its publisher went before the rest, libzmq would abort (#2163)."""
        self._refused.discard(address)
        with contextlib.suppress(zmq.Again):
            self._early.append(self._socket.recv_multipart(zmq.NOBLOCK))
        self._socket.disconnect(address)

    def _end(self) -> None:
        self._is_running = False


def _is_well_formed(frames: list[bytes]) -> bool:
    return len(frames) == 4 and len(frames[1]) == len(frames[2]) == U64.size
