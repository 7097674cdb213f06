"""The connections that we keep to one peer: one for each thread that needs one at the same time."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from dynamo.base import errors
from dynamo.transfer import messages
from dynamo.transfer.limit import Limit
from dynamo.transfer.link import Link

Dial = Callable[[Limit], Link]
Greet = Callable[[Link, Limit], None]


class Links:
    """Thread-safe. A connection that failed in any way is closed, never used again."""

    def __init__(self, dial: Dial, greet: Greet) -> None:
        self._dial, self._greet = dial, greet
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._is_closed = False

    def warm(self, limit: Limit) -> None:
        """Have one ready. Raises TransferError."""
        with self.borrow(limit):
            pass

    @contextlib.contextmanager
    def borrow(self, limit: Limit) -> Iterator[Link]:
        """A connection for one operation. Raises TransferError, also for what a peer says wrongly within."""
        link = self._pop()
        is_new = link is None
        link = link or self._dial(limit)
        try:
            with limit.interruptible(link.interrupt):
                if is_new:
                    self._greet(link, limit)
                yield link
        except errors.RemoteProtocolError as error:
            link.close()
            raise errors.TransferError(f"the peer broke the protocol: {error}") from error
        except BaseException:
            link.close()
            raise
        self._push(link)

    def notify(self, message: bytes, limit: Limit) -> None:
        """Give the peer this message and wait until it has been heard. Raises TransferError."""
        with self.borrow(limit) as link:
            link.send(messages.Notify(message, limit.remaining_s()), limit)
            link.receive(messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)

    def close(self) -> None:
        """Those that are borrowed are closed when they come back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _pop(self) -> Link | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _push(self, link: Link) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        link.close()
