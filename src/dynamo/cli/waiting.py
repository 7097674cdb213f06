"""What a command says of its waiting, on standard error, beside the result on standard output.

`say_regularly` is for waits during which an event loop may be busy, or none runs: a thread says it.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from dynamo.base import clock as clocks

INTERVAL_S = 10.0


def say(text: str) -> None:
    """Write a line to the terminal, apart from the command's result on standard output."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"dynamo: {text}", file=sys.stderr, flush=True)


def can_redraw() -> bool:
    """Return whether standard error is a terminal on which a line can be written anew."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def redraw(line: str, end: str) -> None:
    """Write a line of a terminal anew, cut off where it would go on in a second one, which no later one would clear."""
    width = shutil.get_terminal_size().columns
    sys.stderr.write(f"\r\x1b[K{line[: width - 1]}{end}")
    sys.stderr.flush()


class Progress:
    """A message about waiting: one line that is rewritten on a terminal, a new line every ten seconds elsewhere."""

    def __init__(self, text: str, *, limit_s: float, clock: clocks.Clock) -> None:
        self._text = text
        self._limit_s = limit_s
        self._clock = clock
        self._began_at = self._shown_at = clock.now()
        self._is_terminal = can_redraw()
        say(f"{text} ...")

    def show(self) -> None:
        """Show the seconds that have passed; meant to be called often."""
        now = self._clock.now()
        if now - self._shown_at < (0.5 if self._is_terminal else INTERVAL_S):
            return
        self._shown_at = now
        line = f"{self._text} ({now - self._began_at:.0f} s of at most {self._limit_s:.0f} s)"
        if self._is_terminal:
            redraw(line, "\r")
        else:
            say(line)


@contextlib.contextmanager
def say_regularly(describe: Callable[[], str]) -> Iterator[None]:
    """Say what `describe` returns, and for how long that is waited for, every ten seconds of the block."""
    is_over = threading.Event()
    began_at = time.monotonic()

    def say_each_interval() -> None:
        while not is_over.wait(INTERVAL_S):
            say(f"{describe()} ({time.monotonic() - began_at:.0f} s)")

    speaker = threading.Thread(target=say_each_interval, name="waiting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        is_over.set()
        speaker.join()
