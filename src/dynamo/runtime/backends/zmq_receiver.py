"""The receiving side of the event plane over ZeroMQ: one SUB socket, and one thread that reads it."""

import asyncio
import collections
import contextlib
import errno
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from dynamo.observability import logs
from dynamo.runtime import authentication
from dynamo.runtime.events import Event

HANDSHAKE_MS = 5_000
# A peer that answers no heartbeat for three seconds is left, and so is an attempt to connect. The kernel's keepalive
# holds flows open in firewalls and NATs.
_PEER_WATCH = (
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    (zmq.HEARTBEAT_IVL, 1_000),
    (zmq.HEARTBEAT_TIMEOUT, 3_000),
    (zmq.CONNECT_TIMEOUT, 3_000),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 1_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 15),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
HIGH_WATER = 10_000  # messages that wait for one slow listener before it misses some
PAYLOAD_LIMIT = 16 << 20
_MESSAGE_LIMIT = PAYLOAD_LIMIT + 1024
_END_OF_TOPIC = b"\0"
_NUMBER_AND_PUBLISHER = struct.Struct(">QQ")
_BATCH_LIMIT = 1_000
# Of a handshake that fails because the peer says nothing, as a process that is stopped: it has refused nobody.
SILENT = errno.EAGAIN
HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
MISMATCH = "has another cluster token, or none"
TOKEN_ADVICE = "give every process the same (--cluster-token-file)"
log = logging.getLogger(__name__)


def message_of(event: Event) -> bytes:
    """Return the message of an event: `topic, 0 (one byte), number, publisher (both u64, big-endian), payload`.

    It is one frame, for libzmq aborts the process when a connection ends between two frames of a message: the
    listener's (zeromq/libzmq#2163), or the publisher's when it closes its socket at that moment.
    """
    numbers = _NUMBER_AND_PUBLISHER.pack(event.number, event.publisher)
    return b"".join((event.topic.encode(), _END_OF_TOPIC, numbers, event.payload))


def _event(topic: str, numbers_and_payload: bytes) -> Event:
    number, publisher = _NUMBER_AND_PUBLISHER.unpack_from(numbers_and_payload)
    payload = numbers_and_payload[_NUMBER_AND_PUBLISHER.size :]
    return Event(topic=topic, publisher=publisher, number=number, payload=payload)


def watch_peers(socket: zmq.Socket[bytes]) -> None:
    """Have ZeroMQ notice peers that are gone without a word (a cut, a NAT that forgot them), and connect again."""
    for option, value in _PEER_WATCH:
        socket.set(option, value)


def _public_halves(secrets: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: zmq.curve_public(z85.encode(secret)) for name, secret in secrets.items()}


class EventReceiver:
    """The SUB socket and the thread that reads it. The methods without a note are for the loop's thread.

    zmq's own asyncio sockets cost more per message than all else here. The thread hands over what has come as one
    batch, and takes the next only when the loop has taken that one. So a busy loop gets large batches, and what does
    not fit waits in zmq's bounded queues. The loop talks to it by a queue of commands and a socket to wake it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        deliver: Callable[[list[Event]], None],
        secrets: Mapping[str, bytes],
    ) -> None:
        """`secrets`: the secret keys of CURVE that publishers may use, by name; empty: nothing is encrypted."""
        self._deliver = deliver
        self._log = logs.PeerLog(log, time.monotonic)
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
        self._socket.set(zmq.MAXMSGSIZE, _MESSAGE_LIMIT)
        watch_peers(self._socket)
        self._failures: zmq.Socket[bytes] | None = None  # of handshakes
        self._key_name_by_address: dict[str, str] = {}
        self._public_keys = _public_halves(secrets)
        if secrets:
            self._encrypt()
        self._topic_by_name: dict[bytes, str] = {}
        self._refusals = authentication.RefusalLog(log, time.monotonic)
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="event receiver", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str) -> None:
        self._do(lambda: self._hear(topic))

    def unsubscribe(self, topic: str) -> None:
        self._do(lambda: self._ignore(topic))

    def connect(self, address: str, key_name: str = "") -> None:
        """Connect to a publisher; if it is connected and has another key now, connect anew."""
        former, self._key_name_by_address[address] = (
            self._key_name_by_address.get(address),
            key_name,
        )
        self._uses_by_address[address] += 1
        if key_name and not self._public_keys:  # it closes the connection without a word
            self._do(lambda: self._tell_refusal(address))
        if self._uses_by_address[address] == 1:
            self._do(lambda: self._connect(address))
        elif former != key_name:
            self.reconnect(address)

    def disconnect(self, address: str) -> None:
        self._uses_by_address[address] -= 1
        if not self._uses_by_address[address]:
            del self._uses_by_address[address], self._key_name_by_address[address]
            self._do(lambda: self._socket.disconnect(address))

    def reconnect(self, address: str) -> None:
        """Connect anew to an address that is in use."""
        if address in self._uses_by_address:
            self._do(lambda: self._socket.disconnect(address))
            self._do(lambda: self._connect(address))

    def set_secrets(self, secrets: Mapping[str, bytes]) -> None:
        """Take other keys; publishers of a key that was not known before are connected to anew."""
        former, self._public_keys = self._public_keys, _public_halves(secrets)
        for address, name in self._key_name_by_address.items():
            if name in self._public_keys and name not in former:
                self.reconnect(address)

    def _connect(self, address: str) -> None:
        self._socket.set(zmq.IPV6, "[" in address)
        if self._public_keys:
            first = next(iter(self._public_keys.values()))
            name = self._key_name_by_address.get(address, "")
            self._socket.set(zmq.CURVE_SERVERKEY, self._public_keys.get(name, first))
        self._socket.connect(address)

    def _encrypt(self) -> None:
        public, own_secret = zmq.curve_keypair()
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
        event = parse_monitor_message(failures.recv_multipart())
        if event["value"] != SILENT:
            self._tell_refusal(event["endpoint"].decode())

    def _tell_refusal(self, address: str) -> None:
        """Seldom for each publisher: ZeroMQ tries again for as long as we listen, and we when it is silent."""
        text = "event plane: the publisher at %s %s; %s"
        self._refusals.warning(address, text, address, MISMATCH, TOKEN_ADVICE)

    def _hand_over(self) -> None:
        """Bring what has come to the loop, and wait for `resume` before bringing more."""
        batch: list[Event] = []
        num_malformed = 0
        for _ in range(_BATCH_LIMIT):
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            topic_name, separator, numbers_and_payload = message.partition(_END_OF_TOPIC)
            if not separator or len(numbers_and_payload) < _NUMBER_AND_PUBLISHER.size:
                num_malformed += 1
            elif topic := self._topic_by_name.get(topic_name):
                batch.append(_event(topic, numbers_and_payload))
        if num_malformed:
            self._log.warning("", "dropped %d malformed event messages", num_malformed)
        if batch:
            self._poller.modify(self._socket, 0)
            self._loop.call_soon_threadsafe(self._deliver, batch)

    def _hear(self, topic: str) -> None:
        self._topic_by_name[topic.encode()] = topic
        self._socket.subscribe(topic.encode() + _END_OF_TOPIC)

    def _ignore(self, topic: str) -> None:
        del self._topic_by_name[topic.encode()]
        self._socket.unsubscribe(topic.encode() + _END_OF_TOPIC)

    def _resume(self) -> None:
        self._poller.modify(self._socket, zmq.POLLIN)

    def _end(self) -> None:
        self._is_running = False
