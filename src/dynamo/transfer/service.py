"""What an agent does for its peers: a listening socket, a thread per connection, one operation after the other.

Threads, because bulk bytes through an event loop cost twice as much, and because a blocked thread is all that a
stalled peer can hold. The number of connections is bounded. Strangers have seconds to prove who they are, and places
of their own: when those are taken the oldest gives way, so that a flood of strangers takes no peer's place. Each
operation has the time that its asker gave it.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import msgspec

from dynamo.base import errors
from dynamo.runtime import authentication
from dynamo.transfer import handshake, messages
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import GREETING_LIMIT_S, Link
from dynamo.transfer.routes import Exposed

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
MAX_STRANGERS = 64
MakeLink = Callable[[socket.socket], Link]
_JOIN_S = 5.0
_PAUSE_S = 0.1


class Service:
    """Serves one region on one socket, from construction to `close`."""

    def __init__(
        self,
        sock: socket.socket,
        exposed: Exposed,
        *,
        authenticator: authentication.ConnectionAuthenticator,
        check: Callable[[Link], None] = lambda link: None,
        make_link: MakeLink = Link,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`check` sees each new connection before a word is said, and raises TransferError to drop it.

        `make_link` may raise OSError.
        """
        self._sock, self._exposed, self._check = sock, exposed, check
        self._authenticator = authenticator
        self._make_link, self._max_connections = make_link, max_connections
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._links: dict[Link, threading.Thread] = {}
        self._strangers: dict[
            Link, None
        ] = {}  # of them, those that have proven nothing; the oldest first
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
                sock, _ = self._sock.accept()
            except OSError as error:  # closed, or for a while there are no descriptors left
                if not self._closed.wait(_PAUSE_S):
                    log.warning("%s cannot take a peer's connection: %s", self._exposed.name, error)
                continue
            try:
                link = self._make_link(sock)
            except OSError as error:
                log.debug("a peer of %s went away: %s", self._exposed.name, error)
                sock.close()
                continue
            self._begin(link)

    def _begin(self, link: Link) -> None:
        self._make_room()
        with self._lock:
            if self._closed.is_set():
                link.close()
                return
            self._strangers[link] = None
            thread = threading.Thread(
                target=self._serve, args=(link,), name="transfer-serve", daemon=True
            )
            self._links[link] = thread
            thread.start()

    def _make_room(self) -> None:
        """For one more stranger; its predecessor is gone when this returns, so that threads are bounded, too."""
        with self._lock:
            if len(self._strangers) < MAX_STRANGERS:
                return
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            thread = self._links[oldest]
        oldest.interrupt()
        thread.join(_JOIN_S)

    def _serve(self, link: Link) -> None:
        try:
            self._converse(link)
        except errors.TransferError as error:
            log.debug("a peer of %s went away: %s", self._exposed.name, error)
        except errors.DynamoError as error:
            log.warning("dropping a peer of %s: %s", self._exposed.name, error)
            self._say_why(link, error)
        finally:
            with (
                self._lock
            ):  # first, so that who sees the end of one connection has room for another
                self._links.pop(link, None)
                self._strangers.pop(link, None)
            link.close()

    def _converse(self, link: Link) -> None:
        self._check(link)
        greeting = Limit(GREETING_LIMIT_S)
        handshake.admit(link, authenticator=self._authenticator, limit=greeting)
        self._take_place(link)
        sender = handshake.welcome(link, epoch=self._exposed.epoch, limit=greeting)
        while True:
            request = link.receive(
                *messages.REQUESTS, limit=None, max_bytes=messages.MAX_FRAME_BYTES
            )
            self._answer(link, sender, request)

    def _take_place(self, link: Link) -> None:
        """It is one of us. Raises RemoteProtocolError if there is no place."""
        with self._lock:
            is_full = len(self._links) - len(self._strangers) >= self._max_connections
            if not is_full:
                self._strangers.pop(link, None)
        if is_full:
            raise errors.RemoteProtocolError(
                f"there are {self._max_connections} connections already; close some"
            )

    def _answer(self, link: Link, sender: str, request: msgspec.Struct) -> None:
        match request:
            case messages.Read():
                self._read(link, request)
            case messages.Write():
                self._write(link, request)
            case messages.Notify():
                self._notify(link, sender, request)
            case messages.Attach():
                self._attach(link)

    def _read(self, link: Link, request: messages.Read) -> None:
        limit, memory = Limit(request.timeout_s), self._exposed.region.memory
        spans = messages.unpack(request.pieces, len(memory))
        link.send(messages.Done(), limit, is_more=True)
        link.send_spans(memory, spans, limit, is_summed=request.is_summed)

    def _write(self, link: Link, request: messages.Write) -> None:
        limit, memory = Limit(request.timeout_s), self._exposed.region.memory
        spans = messages.unpack(request.pieces, len(memory))
        link.receive_spans(memory, spans, limit, is_summed=request.is_summed)
        link.send(messages.Done(), limit)

    def _notify(self, link: Link, sender: str, request: messages.Notify) -> None:
        limit = Limit(request.timeout_s)
        try:
            self._exposed.deliver(sender, request.message, limit)
        except errors.TransferError as error:
            self._say_why(link, error)
        else:
            link.send(messages.Done(), limit)

    def _attach(self, link: Link) -> None:
        limit = Limit(GREETING_LIMIT_S)
        if self._exposed.shared is None:
            raise errors.RemoteProtocolError("this pool cannot be mapped")
        link.send(messages.Done(), limit)
        link.send_descriptor(self._exposed.shared.fd, limit)

    @staticmethod
    def _say_why(link: Link, error: errors.DynamoError) -> None:
        try:
            link.send(messages.Refused(str(error)), Limit(1.0))
        except errors.TransferError:
            log.debug("it did not wait to hear that")
