"""The server of an agent: a listening socket, and a thread per connection that does one operation after the other.

Threads, because bulk bytes through an event loop cost twice as much, and because a blocked thread is all that a
stalled peer can hold. The number of connections is bounded: peers keep those that they have used, so one more takes the
place of the longest idle one, and its peer opens another when it needs one; where all are used, it waits for
a moment, and is refused then. A pending connection has seconds to authenticate, and the number of those is bounded
separately: beyond it the oldest is dropped, so that a flood of them takes no peer's place. Each operation has the time
limit that its client gave it.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from dynamo.base import errors
from dynamo.runtime import authentication
from dynamo.transfer import api, messages
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import GREETING_LIMIT_S, Link, admit, welcome

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
MAX_PENDING = 64
IDLE_S = 0.25  # for which a connection has not been used before another may take its place
ROOM_S = 1.5  # for which a connection waits for a place: less than its client does (`link.STALL_S`)
MakeLink = Callable[[socket.socket], Link]
_JOIN_S, _PAUSE_S = 5.0, 0.1
_UNTAKEN = "%s cannot take a peer's connection: %s"


class TransferServer:
    """Serves one region on one socket, from construction to `close`."""

    def __init__(
        self,
        sock: socket.socket,
        exposed: api.Exposed,
        *,
        authenticator: authentication.ConnectionAuthenticator,
        check: Callable[[Link], None] = lambda link: None,
        make_link: MakeLink = Link,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`check` is called with each new connection before any message, and raises TransferError to drop it.

        `make_link` may raise OSError.
        """
        self._sock, self._exposed, self._check = sock, exposed, check
        self._authenticator = authenticator
        self._make_link, self._max_connections = make_link, max_connections
        self._log = authentication.RefusalLog(log, time.monotonic)
        self._lock = threading.Condition()  # notified when a connection ends
        self._closed = threading.Event()
        self._links: dict[Link, threading.Thread] = {}
        self._pending: dict[Link, None] = {}  # of them, those not authenticated yet; oldest first
        self._idle_since: dict[Link, float] = {}  # those that wait for a request; longest first
        sock.listen(128)
        self._accepting = threading.Thread(target=self._accept, name="transfer-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Break all connections and wait for their threads. Idempotent."""
        with self._lock:
            self._closed.set()
            serving = dict(self._links)
        with contextlib.suppress(OSError):  # closed already
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._accepting.join(_JOIN_S)
        self._sock.close()
        for link, thread in serving.items():
            link.interrupt()
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._sock.accept()
            except OSError as error:  # closed, or for a while there are no descriptors left
                if not self._closed.wait(_PAUSE_S):
                    self._log.warning("", _UNTAKEN, self._exposed.name, error)
                continue
            try:
                link = self._make_link(sock)
            except OSError as error:
                log.debug("a peer of %s went away: %s", self._exposed.name, error)
                sock.close()
                continue
            # a peer that is gone has no address any more when its refusal is logged
            self._begin(link, str(address[0]) if isinstance(address, tuple) else "")

    def _begin(self, link: Link, host: str) -> None:
        self._make_room()
        with self._lock:
            if self._closed.is_set():
                link.close()
                return
            self._pending[link] = None
            thread = threading.Thread(
                target=self._serve, args=(link, host), name="transfer-serve", daemon=True
            )
            self._links[link] = thread
            try:
                thread.start()
            except RuntimeError as error:  # for a while there are no threads left
                del self._links[link], self._pending[link]
                link.close()
                self._log.warning("", _UNTAKEN, self._exposed.name, error)

    def _make_room(self) -> None:
        """Drop the oldest pending connection if there are too many; its thread has ended when this returns."""
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                return
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            thread = self._links[oldest]
        oldest.interrupt()
        thread.join(_JOIN_S)

    def _serve(self, link: Link, host: str) -> None:
        try:
            self._converse(link)
        except errors.TransferError as error:
            log.debug("a peer of %s went away: %s", self._exposed.name, error)
        except errors.DynamoError as error:
            at = f" (it is at {host})" if host else ""
            self._log.warning(host, "dropping a peer of %s: %s%s", self._exposed.name, error, at)
            self._refuse(link, error)
        finally:
            # first, so that a peer that sees the end of one connection can open another
            with self._lock:
                self._links.pop(link, None)
                self._pending.pop(link, None)
                self._idle_since.pop(link, None)
                self._lock.notify_all()
            link.close()

    def _converse(self, link: Link) -> None:
        self._check(link)
        greeting = TimeLimit(GREETING_LIMIT_S)
        admit(link, authenticator=self._authenticator, limit=greeting)
        self._count_peer(link)
        sender = welcome(link, epoch=self._exposed.epoch, limit=greeting)
        while True:
            with self._lock:
                self._idle_since[link] = time.monotonic()
            request = link.receive(
                *messages.REQUESTS, limit=None, max_bytes=messages.MAX_FRAME_BYTES
            )
            with self._lock:
                if self._idle_since.pop(link, None) is None:
                    raise errors.TransferError("it was idle, and has given way to another")
            self._answer(link, sender, request)

    def _count_peer(self, link: Link) -> None:
        """Count an authenticated connection, when there is room. Raises Overloaded if there is none for `ROOM_S`."""
        deadline = time.monotonic() + ROOM_S
        with self._lock:
            while len(self._links) - len(self._pending) >= self._max_connections:
                if time.monotonic() >= deadline:
                    raise errors.Overloaded(
                        f"there are {self._max_connections} connections already, all in use; try again"
                    )
                self._evict_idle()
                self._lock.wait(_PAUSE_S)
            self._pending.pop(link, None)

    def _evict_idle(self) -> None:
        """End the connection that has been idle longest, if it has been so for long enough. The caller has the lock."""
        link, since = next(iter(self._idle_since.items()), (None, 0.0))
        if link is not None and time.monotonic() - since >= IDLE_S:
            del self._idle_since[link]
            link.interrupt()

    def _answer(self, link: Link, sender: str, request: msgspec.Struct) -> None:
        memory = self._exposed.region.memory
        match request:
            case messages.Read():
                limit = TimeLimit(request.timeout_s)
                spans = messages.unpack(request.pieces, len(memory))
                link.send(messages.Done(), limit, is_more=True)
                link.send_spans(memory, spans, limit, is_summed=request.is_summed)
            case messages.Write():
                limit = TimeLimit(request.timeout_s)
                spans = messages.unpack(request.pieces, len(memory))
                link.receive_spans(memory, spans, limit, is_summed=request.is_summed)
                link.send(messages.Done(), limit)
            case messages.Notify():
                self._notify(link, sender, request)
            case messages.Attach():
                if self._exposed.descriptor is None:
                    raise errors.RemoteProtocolError("this pool cannot be mapped")
                limit = TimeLimit(GREETING_LIMIT_S)
                link.send(messages.Done(), limit)
                link.send_descriptor(self._exposed.descriptor, limit)

    def _notify(self, link: Link, sender: str, request: messages.Notify) -> None:
        limit = TimeLimit(request.timeout_s)
        try:
            self._exposed.deliver(sender, request.message, limit)
        except errors.TransferError as error:
            self._refuse(link, error)
        else:
            link.send(messages.Done(), limit)

    @staticmethod
    def _refuse(link: Link, error: errors.DynamoError) -> None:
        try:
            link.send(messages.Refused(str(error)), TimeLimit(1.0))
        except errors.TransferError:
            log.debug("the peer has closed before it was refused")
