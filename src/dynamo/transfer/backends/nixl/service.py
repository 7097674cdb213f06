"""What an agent does for its NIXL peers: it answers their words. Their transfers need nothing of it but progress.

One thread owns the endpoint and looks every millisecond. Whoever takes long to hear a notification is waited for on
other threads, so that a busy event loop stops no transfer.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from dynamo.base import errors
from dynamo.transfer.backends.nixl import words
from dynamo.transfer.backends.nixl.endpoint import Endpoint
from dynamo.transfer.limit import MAX_DEADLINE_S, Limit
from dynamo.transfer.routes import Exposed

log = logging.getLogger(__name__)
MAX_PEERS = 256
MAX_UNHEARD = 256  # notifications
_LOOK_S = 0.001
_JOIN_S = 5.0


class Service:
    """From construction to `close`; the endpoint is its own."""

    def __init__(self, endpoint: Endpoint, exposed: Exposed) -> None:
        self._endpoint, self._exposed = endpoint, exposed
        self._names: OrderedDict[str, str] = OrderedDict()  # what peers call themselves
        self._answers: queue.SimpleQueue[tuple[str, words.Word]] = queue.SimpleQueue()
        self._room = threading.Semaphore(MAX_UNHEARD)
        self._telling = ThreadPoolExecutor(4, "transfer-nixl-tell")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="transfer-nixl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Be deaf, and end the endpoint. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)
        self._telling.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._turn()
            except errors.TransferError as error:
                log.warning("%s cannot hear its NIXL peers: %s", self._exposed.name, error)
                time.sleep(1.0)
        self._endpoint.close()

    def _turn(self) -> None:
        for peer, said in self._endpoint.hear():
            try:
                self._answer(peer, words.decode(said))
            except errors.DynamoError as error:
                log.warning("what %s said to %s is of no use: %s", peer, self._exposed.name, error)
        while not self._answers.empty():
            self._say(*self._answers.get())

    def _answer(self, peer: str, word: words.Word) -> None:
        match word:
            case words.Hello():
                self._admit(peer, word)
            case words.Notify():
                self._tell(peer, word)
            case words.Bye():
                self._forget(peer)
            case _:
                log.debug("%s answers what nobody asked", peer)

    def _admit(self, peer: str, hello: words.Hello) -> None:
        if (named := self._endpoint.meet(hello.contact)) != peer:
            self._endpoint.forget(named)
            raise errors.RemoteProtocolError(f"{peer} gave the address of {named}")
        self._names[peer] = hello.name
        if len(self._names) > MAX_PEERS:
            self._forget(next(iter(self._names)))
        self._say(peer, words.Welcome())

    def _forget(self, peer: str) -> None:
        if self._names.pop(peer, None) is not None:
            self._endpoint.forget(peer)

    def _tell(self, peer: str, word: words.Notify) -> None:
        if peer not in self._names:
            return  # we could not answer
        if not self._room.acquire(blocking=False):
            self._say(peer, words.Refused(word.number, "too many notifications at once"))
            return
        self._telling.submit(self._deliver, peer, self._names[peer], word)

    def _deliver(self, peer: str, name: str, word: words.Notify) -> None:
        try:
            limit = Limit(min(max(word.timeout_s, 0.001), MAX_DEADLINE_S))
            self._exposed.deliver(name, word.message, limit)
        except errors.DynamoError as error:
            self._answers.put((peer, words.Refused(word.number, str(error))))
        else:
            self._answers.put((peer, words.Heard(word.number)))
        finally:
            self._room.release()

    def _say(self, peer: str, word: words.Word) -> None:
        try:
            self._endpoint.say(peer, words.encode(word))
        except errors.TransferError as error:  # it has gone: nobody waits for this
            log.debug("%s does not hear %s: %s", peer, self._exposed.name, error)
            self._names.pop(peer, None)
