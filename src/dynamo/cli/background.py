"""An event loop in its own thread, for a command with a main thread that talks to a person.

Line editing, Ctrl-C and Ctrl-D then work as in every terminal program, while the worker, its heartbeats and the streams
run on.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 2.0


class Background:
    """`with Background() as background: background.call(coroutine)`."""

    def __enter__(self) -> "Background":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result; Ctrl-C cancels it and is raised when it has ended."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            ended.wait(_CANCEL_S)
            raise KeyboardInterrupt from None
