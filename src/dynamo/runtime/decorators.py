"""Decorators for a user's own service: its main function, and the handlers of its endpoints."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import addresses, config, draining, errors, process_setup, tasks
from dynamo.protocols import generate
from dynamo.runtime import component, reachability, serving, system_port

Main = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserServiceConfig(component.RuntimeConfig):
    """A process of `dynamo_worker`, which reads DYN_* variables and no flags."""

    system_host: str = config.setting("127.0.0.1", help="address of the system port")
    system_port: addresses.PortRange | None = config.setting(  # noqa: RUF009 (a declaration)
        None,
        help="port of /live, /health, /metrics and commands, or a range of which the first free one is used; 0: any,"
        " -1 (default): none",
    )
    system_enabled: bool | None = config.setting(
        None, help="serve the system port, at 9090 without DYN_SYSTEM_PORT; 0: serve none"
    )
    system_use_endpoint_health_status: tuple[str, ...] = config.setting(
        (), help="endpoints that /health waits for (default: all that are served)"
    )
    health_check_enabled: bool = config.setting(
        False, help="send an endpoint that is quiet its `health_check_payload`"
    )
    canary_wait_time: float = config.setting(
        10.0, help="seconds without an item of an answer before the payload is sent", least=0.1
    )
    health_check_request_timeout: float = config.setting(
        3.0, help="seconds for the first item of the answer to the payload", least=0.1
    )
    graceful_shutdown_timeout_s: float = draining.WORKER.option(
        "seconds for running requests to finish after SIGTERM"
    )
    grace_period_s: float = draining.GRACE.option(
        "seconds after SIGTERM in which new requests are still taken"
    )

    @property
    def used_system_port(self) -> addresses.PortRange | None:
        """The ports of which /health takes the first free one; None: there is no system port."""
        return addresses.system_ports(self.system_port, self.system_enabled)

    @property
    def endpoint_check(self) -> serving.EndpointCheck | None:
        """The limits of the health check; None if it is switched off."""
        if not self.health_check_enabled:
            return None
        return serving.EndpointCheck(
            wait_s=self.canary_wait_time, answer_s=self.health_check_request_timeout
        )


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


def dynamo_worker(
    static: bool = False, *, enable_nats: bool = True
) -> Callable[[Main], Callable[..., Coroutine[Any, Any, None]]]:
    """Decorate `async def main(runtime, ...)`: the result is a function that runs it as a process of the cluster.

    The settings come from DYN_* variables (`UserServiceConfig`). SIGTERM, SIGINT or `runtime.shutdown()` takes the
    process out of discovery, lets open requests end (DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT, 30 s), and cancels
    `main`; a second signal ends the process at once. Raises ConfigError.

    Called where no event loop runs, the function returns when the process has ended, also inside of `asyncio.run`;
    in a coroutine it has to be awaited.
    `static` and `enable_nats` are NVIDIA Dynamo's, for a process without discovery or NATS; here each has discovery,
    and DYN_REQUEST_PLANE and DYN_EVENT_PLANE say whether it uses NATS.
    """

    del static, enable_nats

    def decorate(main: Main) -> Callable[..., Coroutine[Any, Any, None]]:
        @functools.wraps(main)
        def run(*args: Any, **keywords: Any) -> Coroutine[Any, Any, None]:
            running = _run(main, args, keywords)
            if _is_in_loop():
                return running
            asyncio.run(running)
            return _EndedProcess()

        return run

    return decorate


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _run(main: Main, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    settings = reachability.with_reachable_host(
        config.load(UserServiceConfig, prog="dynamo", argv=()), os.environ
    )
    async with (
        await component.DistributedRuntime.open(settings, item_type=generate.Output) as runtime,
        tasks.Tasks() as own,
    ):
        stop = process_setup.stop_on_signals(runtime.stop_requested)
        runtime.served.check = settings.endpoint_check
        served = system_port.ServiceSystemPort(
            runtime.served,
            runtime.engine_routes,
            awaited=settings.system_use_endpoint_health_status,
            is_stopping=stop.is_set,
        )
        try:
            if settings.used_system_port is not None:
                await served.start(settings.system_host, settings.used_system_port)
            running = own.start("the user's main", main(runtime, *args, **keywords))
            running.add_done_callback(lambda _: stop.set())
            await own.run_until(stop)
            limit_s, grace_s = settings.graceful_shutdown_timeout_s, settings.grace_period_s
            await runtime.drain(*((0.0, 0.0) if running.done() else (limit_s, grace_s)))
        finally:
            await served.close()


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
