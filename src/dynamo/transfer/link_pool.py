"""The pool of links to one peer: what was opened for one operation serves the next ones.

The peer may close a link that is idle, to make room for others (`server`); the pool then opens another.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from dynamo.base import errors
from dynamo.transfer import messages
from dynamo.transfer.api import TimeLimit
from dynamo.transfer.link import STALL_S, Link

Dial = Callable[[TimeLimit], Link]
Greet = Callable[[Link, TimeLimit], None]


class LinkPool:
    """The links to one peer: one for each thread that needs one at the same time. Thread-safe.

    A link that failed in any way is closed, never used again.
    """

    def __init__(self, dial: Dial, greet: Greet) -> None:
        self._dial, self._greet = dial, greet
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._is_closed = False

    def warm(self, limit: TimeLimit) -> None:
        """Open a link ahead of need. Raises TransferError."""
        with self.borrow(limit):
            pass

    @contextlib.contextmanager
    def borrow(self, limit: TimeLimit) -> Iterator[Link]:
        """Provide a link for one operation. Raises TransferError, also if the peer breaks the protocol within."""
        opening = limit if limit.remaining_s() <= STALL_S else TimeLimit(STALL_S)
        link = self._take_idle()
        is_new = link is None
        link = link or self._dial(opening)
        try:
            with limit.interruptible(link.interrupt):
                if is_new:
                    self._greet(link, opening)
                yield link
        except errors.RemoteProtocolError as error:
            link.close()
            raise errors.TransferError(f"the peer broke the protocol: {error}") from error
        except BaseException:
            link.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        link.close()

    def _take_idle(self) -> Link | None:
        """Return an idle link, if there is one that the peer has not closed meanwhile, to make room for others."""
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None or not link.has_ended():
                return link
            link.close()

    def notify(self, message: bytes, limit: TimeLimit) -> None:
        """Send the peer a notification and wait until it was handled. Raises TransferError."""
        with self.borrow(limit) as link:
            link.send(messages.Notify(message, limit.remaining_s()), limit)
            link.receive(messages.Done, limit=limit, max_bytes=messages.MAX_GREETING_BYTES)

    def close(self) -> None:
        """Close the idle links; borrowed ones are closed when they are returned."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
