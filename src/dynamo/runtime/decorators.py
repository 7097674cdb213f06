"""Decorators for a user's own service: its main function, and the handlers of its endpoints."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from dynamo.base import config, errors, process_setup, tasks
from dynamo.runtime import component, reachability

DRAIN_S = 30.0
Main = Callable[..., Coroutine[Any, Any, Any]]


def dynamo_worker() -> Callable[[Main], Callable[..., None]]:
    """Decorate `async def main(runtime, ...)`: the result is a function that runs it as a process of the cluster.

    The settings come from DYN_* variables. SIGTERM or SIGINT takes the process out of discovery, lets open requests end
    (30 s at most), and cancels `main`; a second signal ends the process at once. Raises ConfigError.
    """

    def decorate(main: Main) -> Callable[..., None]:
        @functools.wraps(main)
        def run(*args: Any, **keywords: Any) -> None:
            asyncio.run(_run(main, args, keywords))

        return run

    return decorate


async def _run(main: Main, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    settings = reachability.with_reachable_host(
        config.load(component.RuntimeConfig, prog="dynamo", argv=()), os.environ
    )
    async with await component.DistributedRuntime.open(settings) as runtime, tasks.Tasks() as own:
        stop = process_setup.stop_on_signals()
        running = own.start("the user's main", main(runtime, *args, **keywords))
        running.add_done_callback(lambda _: stop.set())
        await own.run_until(stop)
        await runtime.drain(DRAIN_S if not running.done() else 0.0)


def dynamo_endpoint(
    request_type: Any, response_type: Any
) -> Callable[[Callable[[Any], AsyncIterator[Any]]], Callable[[Any], AsyncIterator[Any]]]:
    """Decorate a handler of `serve_endpoint`, to check its requests and the items of its answers against these types.

    The handler gets an object of `request_type`. A request of another shape fails by InvalidRequest.
    """

    def decorate(
        handler: Callable[[Any], AsyncIterator[Any]],
    ) -> Callable[[Any], AsyncIterator[Any]]:
        @functools.wraps(handler)
        async def checked(request: Any) -> AsyncIterator[Any]:
            try:
                value = msgspec.convert(request, request_type)
            except msgspec.ValidationError as error:
                raise errors.InvalidRequest(f"the request does not fit: {error}") from error
            async for item in handler(value):
                yield msgspec.convert(msgspec.to_builtins(item), response_type)

        return checked

    return decorate
