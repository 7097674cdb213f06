"""The conversation with a model in the terminal, and the one prompt from standard input.

The main thread talks to the person; the worker, its heartbeats and the streams run on an event loop in a thread of
their own. Line editing, Ctrl-C and Ctrl-D then work as in every terminal program.
"""

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from dynamo.base import errors
from dynamo.cli import session

with contextlib.suppress(ImportError):  # line editing, where the platform has it
    import readline  # noqa: F401

T = TypeVar("T")
_CANCEL_S = 2.0
_HELP = "Ctrl-C stops an answer, /clear begins anew, /exit or Ctrl-D leaves."


class BackgroundLoop:
    """`with BackgroundLoop() as loop: loop.call(coroutine)`."""

    def __enter__(self) -> "BackgroundLoop":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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


def converse(loop: BackgroundLoop, talk: session.Session, fields: dict[str, Any]) -> None:
    """Answer what the person types, as one conversation, until they leave."""
    print(f"{talk.model}. {_HELP}")
    messages: list[session.Message] = []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, RuntimeError):  # the latter: there is no standard input at all
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
            continue
        if text == "/exit":
            return
        if text == "/clear":
            messages.clear()
        elif text:
            _take_turn(loop, talk, messages, text, fields)


def _take_turn(
    loop: BackgroundLoop,
    talk: session.Session,
    messages: list[session.Message],
    text: str,
    fields: dict[str, Any],
) -> None:
    """Answer one question; add both to the conversation unless the answer was interrupted or failed."""
    conversation = [*messages, {"role": "user", "content": text}]
    try:
        answer = loop.call(talk.chat(conversation, _write, **fields))
    except KeyboardInterrupt:
        print("\n(stopped)")
    except errors.DynamoError as error:
        print(f"(no answer: {error})")
    else:
        print()
        messages[:] = [*conversation, {"role": "assistant", "content": answer.text}]


def answer_standard_input(
    loop: BackgroundLoop, talk: session.Session, fields: dict[str, Any]
) -> None:
    """Answer all of standard input as one prompt. Raises ConfigError if it is empty."""
    text = sys.stdin.read().strip() if sys.stdin else ""
    if not text:
        raise errors.ConfigError("in=stdin: expected a prompt on standard input, got nothing")
    loop.call(talk.chat([{"role": "user", "content": text}], _write, **fields))
    print()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
