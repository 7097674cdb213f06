"""Decorators for a user's own service: its main function, and the handlers of its endpoints."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

import msgspec

from dynamo.base import config, errors, process_setup, tasks
from dynamo.runtime import component, reachability

DRAIN_S = 30.0
Main = Callable[..., Coroutine[Any, Any, Any]]


class _EndedProcess(Coroutine[Any, Any, None]):
    """A coroutine that is complete, for `asyncio.run(worker())`, as services for NVIDIA Dynamo have it."""

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, *error: Any) -> Any:
        raise StopIteration

    def close(self) -> None:
        """Do nothing: it has ended."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


def dynamo_worker(static: bool = False) -> Callable[[Main], Callable[..., _EndedProcess]]:
    """Decorate `async def main(runtime, ...)`: the result is a function that runs it as a process of the cluster.

    The settings come from DYN_* variables. SIGTERM or SIGINT takes the process out of discovery, lets open requests end
    (30 s at most), and cancels `main`; a second signal ends the process at once. Raises ConfigError.

    `static` is NVIDIA Dynamo's, for a process without discovery; here each has discovery.
    """

    del static

    def decorate(main: Main) -> Callable[..., _EndedProcess]:
        @functools.wraps(main)
        def run(*args: Any, **keywords: Any) -> _EndedProcess:
            asyncio.run(_run(main, args, keywords))
            return _EndedProcess()

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
) -> Callable[[Callable[..., AsyncIterator[Any]]], Callable[..., AsyncIterator[Any]]]:
    """Decorate a handler of `serve_endpoint`, to check its requests and the items of its answers against these types.

    It may be a method, and gets an object of `request_type`. A request of another shape fails by InvalidRequest.
    Either may be a model of pydantic, as with NVIDIA Dynamo, where answers of such a type are not checked either.
    """

    def decorate(
        handler: Callable[..., AsyncIterator[Any]],
    ) -> Callable[..., AsyncIterator[Any]]:
        @functools.wraps(handler)
        async def checked(*args: Any, **context: Any) -> AsyncIterator[Any]:
            *owner, request = args
            try:
                value = read_value(request, request_type)
            except msgspec.ValidationError as error:
                reason = " ".join(str(error).split())
                raise errors.InvalidRequest(f"the request does not fit: {reason}") from error
            async for item in handler(*owner, value, **context):
                plain = to_plain(item)
                is_model = hasattr(response_type, "model_validate")
                yield plain if is_model else msgspec.convert(plain, response_type)

        return checked

    return decorate


def read_value(value: Any, kind: Any) -> Any:
    """Return a JSON-like value in a type; models of pydantic may stand anywhere in it. Raises ValidationError."""
    return msgspec.convert(value, kind, dec_hook=_read_model)


def _read_model(kind: Any, value: Any) -> Any:
    """Return a model of pydantic's, also from its JSON, which examples of 0.3 send; msgspec checks other values."""
    if not hasattr(kind, "model_validate"):
        return value
    is_json = isinstance(value, str) and value.startswith("{")
    return kind.model_validate_json(value) if is_json else kind.model_validate(value)


def to_plain(value: Any) -> Any:
    """Return a value as JSON-like objects: of dataclasses, msgspec's structs and pydantic's models."""
    return msgspec.to_builtins(value, enc_hook=_dump_model)


def _dump_model(value: Any) -> Any:
    if not hasattr(value, "model_dump"):
        raise TypeError(f"expected JSON-like values, got {value!r:.60}")
    return value.model_dump(mode="json")
