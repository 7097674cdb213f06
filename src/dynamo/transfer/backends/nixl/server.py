"""The server of an agent for its NIXL peers: it answers their messages. Their transfers need only its progress.

One thread owns the endpoint and looks every millisecond. Notifications are handed to the event loop by other threads,
so that a busy loop stops no transfer.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from dynamo.base import errors
from dynamo.transfer.backends.nixl import messages as nixl_messages
from dynamo.transfer.backends.nixl.endpoint import NixlEndpoint
from dynamo.transfer.job import MAX_DEADLINE_S, TimeLimit
from dynamo.transfer.routes import Exposed

log = logging.getLogger(__name__)
MAX_PEERS = 256
MAX_UNDELIVERED = 256  # notifications
_LOOK_S = 0.001
_JOIN_S = 5.0


class NixlServer:
    """Serves from construction to `close`, and owns the endpoint."""

    def __init__(self, endpoint: NixlEndpoint, exposed: Exposed) -> None:
        self._endpoint, self._exposed = endpoint, exposed
        self._names: OrderedDict[str, str] = OrderedDict()  # the names that peers gave themselves
        self._answers: queue.SimpleQueue[tuple[str, nixl_messages.NixlMessage]] = (
            queue.SimpleQueue()
        )
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
        while not self._closed.wait(_LOOK_S):
            try:
                self._turn()
            except errors.TransferError as error:
                log.warning("%s cannot receive from its NIXL peers: %s", self._exposed.name, error)
                time.sleep(1.0)
        self._endpoint.close()

    def _turn(self) -> None:
        for peer, body in self._endpoint.receive():
            try:
                match nixl_messages.decode(body):
                    case nixl_messages.NixlHello() as hello:
                        self._admit(peer, hello)
                    case nixl_messages.NixlNotify() as notification:
                        self._accept_notification(peer, notification)
                    case nixl_messages.NixlBye():
                        self._forget(peer)
                    case _:
                        log.debug("%s sent an answer without a request", peer)
            except errors.DynamoError as error:
                log.warning("ignored a message of %s to %s: %s", peer, self._exposed.name, error)
        while not self._answers.empty():
            self._send(*self._answers.get())

    def _admit(self, peer: str, hello: nixl_messages.NixlHello) -> None:
        if (name := self._endpoint.add_peer(hello.contact)) != peer:
            self._endpoint.remove_peer(name)
            raise errors.RemoteProtocolError(f"{peer} gave the address of {name}")
        self._names[peer] = hello.name
        if len(self._names) > MAX_PEERS:
            self._forget(next(iter(self._names)))
        self._send(peer, nixl_messages.NixlWelcome())

    def _forget(self, peer: str) -> None:
        if self._names.pop(peer, None) is not None:
            self._endpoint.remove_peer(peer)

    def _accept_notification(self, peer: str, message: nixl_messages.NixlNotify) -> None:
        if peer not in self._names:
            return  # it did not say hello, so it cannot be answered
        if not self._undelivered.acquire(blocking=False):
            self._send(
                peer, nixl_messages.NixlRefused(message.number, "too many notifications at once")
            )
            return
        self._deliverers.submit(self._deliver, peer, self._names[peer], message)

    def _deliver(self, peer: str, name: str, message: nixl_messages.NixlNotify) -> None:
        try:
            limit = TimeLimit(min(max(message.timeout_s, 0.001), MAX_DEADLINE_S))
            self._exposed.deliver(name, message.message, limit)
        except errors.DynamoError as error:
            self._answers.put((peer, nixl_messages.NixlRefused(message.number, str(error))))
        else:
            self._answers.put((peer, nixl_messages.NixlHeard(message.number)))
        finally:
            self._undelivered.release()

    def _send(self, peer: str, message: nixl_messages.NixlMessage) -> None:
        try:
            self._endpoint.send(peer, nixl_messages.encode(message))
        except errors.TransferError as error:  # the peer has gone, and waits for nothing
            log.debug("%s cannot be reached from %s: %s", peer, self._exposed.name, error)
            self._names.pop(peer, None)
