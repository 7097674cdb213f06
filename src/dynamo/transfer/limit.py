"""How long an operation may take, and the way to stop it earlier from another thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from dynamo.base import errors

MAX_DEADLINE_S = 600.0


class Limit:
    """One thread works under it and asks `remaining_s` often; any other may `cancel`."""

    def __init__(self, deadline_s: float) -> None:
        """Raises LocalProtocolError unless 0 < deadline_s <= MAX_DEADLINE_S."""
        if not 0 < deadline_s <= MAX_DEADLINE_S:
            raise errors.LocalProtocolError(
                f"deadline_s is {deadline_s}, expected at most {MAX_DEADLINE_S}, and more than 0"
            )
        self.deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._interrupt: Callable[[], None] | None = None

    def remaining_s(self) -> float:
        """More than 0. Raises TransferError when it is over."""
        if self._is_cancelled:
            raise errors.TransferError("cancelled")
        remaining_s = self._until - time.monotonic()
        if remaining_s <= 0:
            raise errors.TransferError(f"not complete within {self.deadline_s:g} s")
        return remaining_s

    def cancel(self) -> None:
        """Stop the work, and what it waits for."""
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within this, `cancel` calls `interrupt`, which ends a wait that would not notice otherwise."""
        with self._lock:
            self._interrupt = interrupt
        try:
            self.remaining_s()
            yield
        finally:
            with self._lock:
                self._interrupt = None
