"""Namespace, component and endpoint as objects, with the names of NVIDIA Dynamo's Python bindings, for user services.

    endpoint = runtime.endpoint("ns.backend.generate")
    await endpoint.serve_endpoint(handler)          # handler: an async generator of JSON-like values

    client = await endpoint.client()
    await client.wait_for_instances()
    stream = await client.round_robin(request)
    async for item in stream: print(item.data())

`client.EndpointClient`, beneath it, has typed calls and streams.
"""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, ids
from dynamo.protocols import instances
from dynamo.runtime import client as clients
from dynamo.runtime import instance_records, requests, serving
from dynamo.runtime.request_context import Context

START_S = 300.0  # how long `wait_for_instances` waits by default
_STOP = 1  # the signal of a client that wants no further items


class RouterMode(enum.Enum):
    """The ways to choose an instance, with the names of NVIDIA Dynamo's bindings."""

    RoundRobin = "round-robin"
    Random = "random"
    KV = "kv"
    Direct = "direct"  # by the caller: `Client.direct`


class Registrar(Protocol):
    """The part of a distributed runtime that endpoints use."""

    instance_id: ids.InstanceId
    clock: clocks.Clock
    served: serving.ServedEndpoints
    records: instance_records.InstanceRecords

    async def register(
        self, name: instances.EndpointName, handler: requests.Handler
    ) -> instances.Instance:
        """Answer calls of an endpoint by `handler`, and publish this instance in discovery."""
        ...

    async def unregister(self, name: instances.EndpointName) -> None:
        """Undo `register`."""
        ...

    def shared_client(self, name: instances.EndpointName) -> clients.EndpointClient:
        """Return the client that follows an endpoint."""
        ...


class Namespace:
    """A group of components that find each other."""

    def __init__(self, runtime: Registrar, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def component(self, name: str) -> "Component":
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
        """Return an endpoint of this component; capitals in its name, and in those before, are those of small letters.

        Raises ConfigError for other characters than letters, digits, - and _.
        """
        path = f"{self._namespace}.{self.name}.{name}".lower()
        return Endpoint(self._runtime, instances.EndpointName.parse(path))


class Endpoint:
    """A function that the processes of a component serve."""

    def __init__(self, runtime: Registrar, name: instances.EndpointName) -> None:
        self.runtime = runtime
        self.name = name

    async def serve_endpoint(
        self,
        handler: serving.Generate,
        graceful_shutdown: bool = True,
        metrics_labels: Sequence[tuple[str, str]] | None = None,
        health_check_payload: Mapping[str, Any] | None = None,
        *,
        on_listed: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer this endpoint until the task is cancelled; then it may be served again.

        `handler(request)` is an async generator of the answer.

        A handler with a parameter `context` gets the `Context` of the request as well.

        When the process drains, requests under way are finished; without `graceful_shutdown` they end at once by
        WorkerLost, so that their callers may ask another instance. `metrics_labels` are further labels of this
        endpoint's metrics at the system port. `health_check_payload` is the request that a health check sends to the
        handler (DYN_HEALTH_CHECK_ENABLED) when nothing was answered for DYN_CANARY_WAIT_TIME seconds; an answer that
        fails makes /health say 503. Both need the system port of a process of `dynamo_worker`.
        `on_listed` is called when discovery lists the endpoint.

        The request and each item are JSON-like values. A client that goes away cancels its handler. An error of
        `base.errors` reaches the client as it is; any other is logged here and reaches it as a DynamoError.
        Raises ConfigError.
        """
        served = serving.ServedEndpoint(
            self.name,
            handler,
            is_graceful=graceful_shutdown,
            labels=metrics_labels or (),
            health_check_payload=health_check_payload,
            adapters=self.runtime.served.adapters,
            clock=self.runtime.clock,
        )
        self.runtime.served.add(served)
        # each part of the end happens, whatever becomes of those before it
        async with contextlib.AsyncExitStack() as end:
            end.callback(self.runtime.served.discard, served)
            end.push_async_callback(served.close)
            end.push_async_callback(self.runtime.unregister, self.name)
            await self.runtime.register(self.name, served.start_call)
            on_listed()
            served.start_checks(self.runtime.served.check)
            await asyncio.Event().wait()

    def component(self) -> Component:
        return Component(self.runtime, self.name.namespace, self.name.component)

    def connection_id(self) -> int:
        """Return the id of this process as an instance."""
        return self.runtime.instance_id

    lease_id = connection_id  # its name before version 0.8

    @property
    def metrics(self) -> serving.RuntimeMetrics:
        """The way to show further metrics at the system port."""
        return serving.RuntimeMetrics(self.runtime.served)

    async def unregister_endpoint_instance(self) -> None:
        """Remove this endpoint of this process from discovery; requests that still come are answered."""
        await self.runtime.records.withdraw_endpoint(self.name)

    async def register_endpoint_instance(self) -> None:
        """Publish this endpoint of this process again, after `unregister_endpoint_instance`."""
        await self.runtime.records.restore_endpoint(self.name)

    async def client(self, router_mode: RouterMode | None = None) -> "Client":
        """Return a client that follows the instances of this endpoint; `router_mode` is that of its `generate`.

        Raises ConfigError for RouterMode.KV: `KvRouter` of `dynamo.llm` chooses by cached prefixes.
        """
        if router_mode is RouterMode.KV:
            raise errors.ConfigError(
                "RouterMode.KV: a client of an endpoint cannot choose by cached prefixes; KvRouter of dynamo.llm can,"
                " and python -m dynamo.router"
            )
        is_random = router_mode is RouterMode.Random
        return Client(
            self.runtime.shared_client(self.name), "random" if is_random else "round-robin"
        )


class Annotated:
    """One item of an answer. An error is raised by the iteration, so an item is never one."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def data(self) -> Any:
        """Return the value that the handler yielded."""
        return self._data

    def is_error(self) -> bool:
        """Return False."""
        return False

    def event(self) -> str | None:
        """Return None: items have no name of an event here."""
        return None

    def comments(self) -> list[str] | None:
        """Return None: items have no comments here."""
        return None

    def id(self) -> str | None:
        """Return None: items have no id here."""
        return None

    def __repr__(self) -> str:
        return f"Annotated(data={self._data!r})"


class ItemStream:
    """The items of an answer, as they come. Closing or dropping it cancels the handler."""

    def __init__(
        self,
        stream: requests.Stream,
        receiver: requests.ItemReceiver[Any],
        context: Context,
        read_item: Callable[[Any], Any],
    ) -> None:
        """Read the items of `stream`, which stops with the request of `context`, from its receiver."""
        self._stream = stream
        self._receiver = receiver
        self._read_item = read_item
        self._is_over = False
        self._stopped = context.async_killed_or_stopped()
        self._stopped.add_done_callback(lambda _: stream.send_signal(_STOP))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item = await anext(self._receiver)
        except BaseException:
            self._end()
            raise
        return self._read_item(item)

    async def aclose(self) -> None:
        """Cancel the handler, if it has not ended. Idempotent."""
        self._end()

    def __del__(self) -> None:
        if not self._stopped.get_loop().is_closed():
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._stream.cancel()
            self._stopped.cancel()


class Client:
    """The instances of an endpoint, and the ways to choose one for a request."""

    def __init__(self, endpoint_client: clients.EndpointClient, mode: clients.Mode) -> None:
        self._client = endpoint_client
        self._mode: clients.Mode = mode

    def instance_ids(self) -> list[int]:
        """Return the ids of the present instances, in rising order."""
        return sorted(self._client.instances)

    async def wait_for_instances(self, timeout_s: float = START_S) -> list[int]:
        """Wait until there is an instance and return their ids. Raises NoWorkers if none comes in time."""
        while not (
            instance_ids := self.instance_ids()
        ):  # one may leave before this task has its turn
            await self._client.wait_for_instances(timeout_s)
        return instance_ids

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ItemStream:
        """Send a request to any instance, by the mode of this client; else as `round_robin`."""
        return await self._open(request, annotated, context, mode=self._mode)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ItemStream:
        """Send a request to the next instance and return an iterator over its answer.

        Items are `Annotated`, or plain values if not `annotated`. Closing the iterator cancels the handler. With the
        `context` of another request it has the id of that one, and is stopped with it. Raises NoWorkers or WorkerLost;
        iterating raises WorkerLost or the handler's error.
        """
        return await self._open(request, annotated, context)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ItemStream:
        """Send a request to a random instance; else as `round_robin`."""
        return await self._open(request, annotated, context, mode="random")

    async def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool = True,
        context: Context | None = None,
    ) -> ItemStream:
        """Send a request to this instance; else as `round_robin`."""
        return await self._open(request, annotated, context, instance_id=instance_id)

    async def _open(
        self,
        request: Any,
        annotated: bool,
        context: Context | None,
        *,
        mode: clients.Mode = "round-robin",
        instance_id: int | None = None,
    ) -> ItemStream:
        context = context or Context()
        receiver: requests.ItemReceiver[Any] = requests.ItemReceiver(object)
        stream = await self._client.open(
            request, receiver, mode=mode, instance_id=instance_id, headers=context.headers
        )
        return ItemStream(stream, receiver, context, _annotate if annotated else _to_plain)


def _to_plain(item: Any) -> Any:
    """Return an item as JSON-like values, which the tokens of a worker are not."""
    return msgspec.to_builtins(item) if isinstance(item, msgspec.Struct) else item


def _annotate(item: Any) -> Annotated:
    return Annotated(_to_plain(item))
