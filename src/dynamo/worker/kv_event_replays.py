"""The endpoint `kv_events_replay`: a worker's answers to routers that missed some of its KV events, or join late.

All blocks of a worker go to one router at a time. Each answer copies its index of them, and many at once, as when a
frontend with many processes starts, would take as much memory each, and stop the worker until all were copied.
"""

import asyncio
import contextlib

import msgspec

from dynamo.base import errors, tasks
from dynamo.protocols import kv_events, wire
from dynamo.runtime import requests
from dynamo.worker import kv_event_publisher


def replay_handler(
    publisher: kv_event_publisher.KvEventPublisher, running: tasks.Tasks
) -> requests.Handler:
    """Return the handler of the endpoint, which answers each request by a task of `running`."""
    is_copied = asyncio.Lock()

    async def answer(call: requests.Call) -> None:
        try:
            request = msgspec.msgpack.decode(call.body, type=kv_events.ReplayRequest)
        except wire.DECODE_ERRORS as error:
            call.fail(errors.RemoteProtocolError(f"expected a request for a replay: {error}"))
            return
        async with is_copied if publisher.begins_anew(request) else contextlib.nullcontext():
            for part in publisher.replay(request):
                call.reply(part)
                await asyncio.sleep(0)  # let the engine's outputs go out between two parts
        call.finish()

    def start(call: requests.Call) -> None:
        task = running.start("replay KV events", answer(call))

        def cancel() -> None:
            task.cancel()

        call.on_cancel(cancel)

    return start
