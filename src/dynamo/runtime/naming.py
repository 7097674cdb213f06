"""Namespace, component and endpoint as objects, with the names of NVIDIA Dynamo's Python bindings, for user services.

    endpoint = runtime.namespace("ns").component("backend").endpoint("generate")
    await endpoint.serve_endpoint(handler)          # handler: an async generator of JSON-like values

    client = await endpoint.client()
    await client.wait_for_instances()
    stream = await client.round_robin(request)
    async for item in stream: print(item.data())

`client.EndpointClient`, beneath it, has typed calls and streams.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import msgspec

from dynamo.base import errors, ids, tasks
from dynamo.protocols import instances, wire
from dynamo.runtime import client as clients
from dynamo.runtime import requests

START_S = 300.0  # how long `wait_for_instances` waits by default
_log = logging.getLogger(__name__)
_STOP = 1  # the signal of a client that wants no further items
_ID_HEADER = "x-request-id"
_FORWARDED = ("traceparent", "tracestate")
Generate = Callable[..., AsyncIterator[Any]]


class Registrar(Protocol):
    """The part of a distributed runtime that endpoints use."""

    async def register(
        self, name: instances.EndpointName, handler: requests.Handler
    ) -> instances.Instance:
        """Answer an endpoint and publish this instance."""
        ...

    def client(self, name: instances.EndpointName) -> clients.EndpointClient:
        """Return a client that follows an endpoint."""
        ...


class Namespace:
    """A group of components that find each other."""

    def __init__(self, runtime: Registrar, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def component(self, name: str) -> "Component":
        """Return a component of this namespace."""
        return Component(self._runtime, self.name, name)


class Component:
    """A group of equal processes."""

    def __init__(self, runtime: Registrar, namespace: str, name: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self.name = name

    async def create_service(self) -> None:
        """Do nothing: an endpoint needs no more than to be served. NVIDIA Dynamo wanted this call before it."""

    def endpoint(self, name: str) -> "Endpoint":
        """Return an endpoint of this component. Raises ConfigError for a name with other than a-z, 0-9, - and _."""
        url = f"dyn://{self._namespace}.{self.name}.{name}"
        return Endpoint(self._runtime, instances.EndpointName.parse(url))


class Context:
    """One request, as its handler and the requests that it makes of others see it.

    It is *stopped* when no further items are wanted, and *killed* when its client is gone.
    """

    def __init__(self, id: str | None = None, *, headers: Mapping[str, str] = {}) -> None:  # noqa: A002 (theirs; read only)
        """`id` is made up if it is not given; `headers` are those of the request that a handler answers."""
        self._id = id or headers.get(_ID_HEADER) or ids.new_request_id()
        self._trace = {name: headers[name] for name in _FORWARDED if name in headers}
        self._is_stopped = self._is_killed = False
        self._waiting: set[asyncio.Future[bool]] = set()

    def id(self) -> str:
        """Return the id of the request, which it has in each process."""
        return self._id

    def is_stopped(self) -> bool:
        """Return whether no further items are wanted."""
        return self._is_stopped

    def is_killed(self) -> bool:
        """Return whether the client is gone."""
        return self._is_killed

    def stop_generating(self) -> None:
        """Have the handler of the request end its answer behind the present item. Idempotent."""
        self._is_stopped = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(True)

    def kill(self) -> None:
        """Take note that the client is gone. Idempotent."""
        self._is_killed = True
        self.stop_generating()

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        """Return what is done when the request is killed or stopped; it may be cancelled."""
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._is_stopped:
            waiting.set_result(True)
        else:
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
        return waiting

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by which another process names this request."""
        return {_ID_HEADER: self._id, **self._trace}


class Endpoint:
    """A function that the processes of a component serve."""

    def __init__(self, runtime: Registrar, name: instances.EndpointName) -> None:
        self._runtime = runtime
        self.name = name

    async def serve_endpoint(
        self, handler: Generate, *, on_listed: Callable[[], None] = lambda: None
    ) -> None:
        """Answer this endpoint until the task is cancelled. `handler(request)` is an async generator of the answer.

        A handler with a parameter `context` gets the `Context` of the request as well.
        `on_listed` is called when discovery lists it.

        The request and each item are JSON-like values. A client that goes away cancels its handler. An error of
        `base.errors` reaches the client as it is; any other is logged here and reaches it as a DynamoError.
        """
        takes_context = "context" in inspect.signature(handler).parameters
        async with tasks.Tasks() as running:

            def start_call(call: requests.Call) -> None:
                context = Context(headers=call.headers)
                keywords = {"context": context} if takes_context else {}
                answering = _answer(call, context, lambda request: handler(request, **keywords))
                task = running.start(f"answer {call.endpoint}", answering)
                call.on_signal(lambda _: context.stop_generating())
                call.on_cancel(lambda: _cancel(task, context))

            await self._runtime.register(self.name, start_call)
            on_listed()
            await asyncio.Event().wait()

    async def client(self) -> "Client":
        """Return a client that follows the instances of this endpoint."""
        return Client(self._runtime.client(self.name))


class Annotated:
    """One item of an answer."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def data(self) -> Any:
        """Return the value that the handler yielded."""
        return self._value


class Client:
    """The instances of an endpoint, and the ways to choose one for a request."""

    def __init__(self, endpoint_client: clients.EndpointClient) -> None:
        self._client = endpoint_client

    def instance_ids(self) -> list[int]:
        """Return the ids of the present instances, in rising order."""
        return sorted(self._client.instances)

    async def wait_for_instances(self, timeout_s: float = START_S) -> list[int]:
        """Wait until there is an instance and return their ids. Raises NoWorkers if none comes in time."""
        await self._client.wait_for_instances(timeout_s)
        return self.instance_ids()

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> AsyncIterator[Any]:
        """Send a request to any instance and return an iterator over its answer; as `round_robin`."""
        return await self.round_robin(request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> AsyncIterator[Any]:
        """Send a request to the next instance. Items are `Annotated`, or plain values if not `annotated`.

        Closing the iterator cancels the handler. With the `context` of another request it has the id of that one, and
        is stopped with it. Iterating raises NoWorkers, WorkerLost or the handler's error.
        """
        return _items(self._client, request, annotated, context)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> AsyncIterator[Any]:
        """Send a request to a random instance; else as `round_robin`."""
        return _items(self._client, request, annotated, context, mode="random")

    async def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool = True,
        context: Context | None = None,
    ) -> AsyncIterator[Any]:
        """Send a request to this instance; else as `round_robin`."""
        return _items(self._client, request, annotated, context, instance_id=instance_id)


async def _items(
    endpoint_client: clients.EndpointClient,
    request: Any,
    annotated: bool,
    context: Context | None,
    *,
    mode: clients.Mode = "round-robin",
    instance_id: int | None = None,
) -> AsyncIterator[Any]:
    context = context or Context()
    receiver: requests.ItemReceiver[Any] = requests.ItemReceiver(object)
    stream = await endpoint_client.open(
        request, receiver, mode=mode, instance_id=instance_id, headers=context.headers
    )
    stopped = context.async_killed_or_stopped()
    stopped.add_done_callback(lambda _: stream.send_signal(_STOP))
    try:
        async for item in receiver:
            yield Annotated(item) if annotated else item
    finally:
        stream.cancel()
        stopped.cancel()


async def _answer(call: requests.Call, context: Context, handler: Generate) -> None:
    try:
        try:
            request = msgspec.msgpack.decode(call.body)
        except wire.DECODE_ERRORS as error:
            raise errors.InvalidRequest(f"expected a request in msgpack: {error}") from error
        async for item in handler(request):
            call.reply(item)
            if context.is_stopped():
                break
    except errors.DynamoError as error:
        call.fail(error)
    except Exception as error:  # noqa: BLE001 (the supervisor of a user's handler)
        _log.exception("the handler of %s failed", call.endpoint)
        call.fail(errors.DynamoError(f"internal error in {call.endpoint}: {type(error).__name__}"))
    else:
        call.finish()


def _cancel(task: asyncio.Task[None], context: Context) -> None:
    context.kill()
    task.cancel()
