"""The API server of `dynamo.testing.kube` without sockets: `MemoryCluster.connect()` gives a connection to it.

It is the transport below `KubernetesConnection`, so the paths, bodies and errors of the connection are tested with it,
and objects are checked as by the server that listens. No node runs pods, and no controller but the garbage collector,
which works while the cluster is entered (`async with`). A test plays what is missing by `put_object` and
`remove_object`, and disturbs connections by `failures`, `cut_watches` and `forget_history`.
"""

import asyncio
import importlib.resources
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import httpx2

from dynamo.base import clock as clocks
from dynamo.runtime.backends.kubernetes import connection
from dynamo.runtime.http import exchange
from dynamo.testing.kube import (
    api,
    calls,
    controllers,
    garbage,
    http_front,
    metadata,
    resources,
    rights,
    store,
)

Object = dict[str, Any]
_TOKEN = "memory"


class MemoryCluster(httpx2.AsyncBaseTransport):
    """All objects of one cluster. Its attributes let a test look in and disturb it.

    `log_by_pod` is what `read_log` answers, `failures` are answers to be given first.
    """

    def __init__(self) -> None:
        self.store = store.Store()
        self.log_by_pod: dict[str, str] = {}
        self.failures: list[httpx2.Response | httpx2.HTTPError] = []
        self._registry = resources.ResourceRegistry()
        definitions = importlib.resources.files("dynamo.operator").joinpath("definitions.json")
        for definition in json.loads(definitions.read_text()):
            self._registry.define(definition)
        authority = rights.Authority(self.store, _TOKEN)
        served = api.Api(self._registry, self.store, authority)
        self._front = http_front.HttpFront(served, authority=authority)
        self._front.pod_handler = self._answer_log
        collector = garbage.GarbageCollector(served)
        self._control = controllers.ControllerLoop(self.store, [collector], clocks.SystemClock())
        self._controlling: asyncio.Task[None] | None = None
        self._streams: set[_MemoryExchange] = set()

    async def __aenter__(self) -> Self:
        self._controlling = asyncio.create_task(self._control.run(), name="controllers")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        assert self._controlling is not None
        self._control.close()
        self._controlling.cancel()
        await asyncio.wait([self._controlling])

    def connect(self, namespace: str = "default") -> connection.KubernetesConnection:
        """Return a connection to this cluster, in a namespace that is made if need be."""
        if self.store.get(("", "namespaces"), ("", namespace)) is None:
            head = {"apiVersion": "v1", "kind": "Namespace"}
            self.put_object(head | garbage.new_namespace(namespace))
        client = httpx2.AsyncClient(
            transport=self,
            base_url="http://memory-kubernetes",
            headers={"Authorization": f"Bearer {_TOKEN}"},
        )
        return connection.KubernetesConnection(client, namespace)

    def define(self, definition: Object) -> None:
        """Serve the kind of a complete definition, as if it had been established."""
        self._registry.define(definition)

    def undefine(self, api_version: str) -> None:
        """Forget all kinds of a group, given by one of its apiVersions."""
        for resource in self._registry:
            if resource.api_version == api_version:
                self._registry.remove(resource.group, resource.plural)

    def put_object(self, obj: Object) -> None:
        """Create or replace an object unchecked, as a controller of the cluster would."""
        table, name = self._place(obj["apiVersion"], obj["kind"], obj["metadata"])
        stored = self.store.get(table, name)
        if stored is None:
            uid, created_at, generation = f"{uuid.uuid4()}", metadata.timestamp(), 1
        else:
            before = stored["metadata"]
            uid, created_at = before["uid"], before["creationTimestamp"]
            generation = before.get("generation", 0) + 1
        head = {"uid": uid, "creationTimestamp": created_at, "generation": generation}
        self.store.put(table, {**obj, "metadata": {**obj["metadata"], **head}})

    def remove_object(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Remove an object, whatever its finalizers."""
        place = self._place(api_version, kind, {"namespace": namespace, "name": name})
        self.store.delete(*place)

    def _place(self, api_version: str, kind: str, head: Object) -> tuple[store.Table, store.Name]:
        resource = self._registry.find_kind(api_version, kind)
        assert resource is not None
        return resource.key, (head.get("namespace", ""), head["name"])

    def forget_history(self) -> None:
        """Answer 410 to every watch that wants to resume from before now, and cut those that run."""
        self.store.compact()
        self.cut_watches()

    def cut_watches(self) -> None:
        """Break the connections of all watches."""
        for stream in self._streams:
            stream.cut()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request of a connection."""
        await asyncio.sleep(0)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, httpx2.HTTPError):
                raise failure
            return failure
        answering = _MemoryExchange(request, self._streams)
        answering.handling = asyncio.create_task(answering.run(self._front.answer))
        try:
            return await answering.answer
        except asyncio.CancelledError:
            answering.disconnected()
            raise

    async def _answer_log(self, call: calls.ApiCall, pod: Object, subresource: str) -> bool:
        call.exchange.respond(200, self.log_by_pod[pod["metadata"]["name"]].encode())
        return subresource == "log"


class _MemoryExchange(exchange.Exchange, httpx2.AsyncByteStream):
    """An exchange that answers with a response in memory, and is itself the body of a stream."""

    def __init__(self, request: httpx2.Request, streams: "set[_MemoryExchange]") -> None:
        incoming = exchange.Request(
            method=request.method,
            path=request.url.path,
            query=request.url.query.decode(),
            headers=dict(request.headers),
            body=request.content,
            peer="memory",
        )
        super().__init__(incoming, exchange.NoConnection(), lambda: None)
        self.answer: asyncio.Future[httpx2.Response] = asyncio.get_running_loop().create_future()
        self.handling: asyncio.Task[None] | None = None  # of a stream, which outlives its head
        self._streams = streams
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_cut = False

    async def run(self, handler: Callable[[exchange.Exchange], Awaitable[None]]) -> None:
        """Let a handler answer; what it raises before goes to the client's caller."""
        try:
            await handler(self)
        except Exception as error:
            if self.answer.done():
                raise
            self.answer.set_exception(error)

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: exchange.Headers = (),
    ) -> None:
        """Answer with a complete body."""
        if self.answer.done():  # cancelled
            return
        head = [("content-type", content_type), *self.headers, *headers]
        self.answer.set_result(httpx2.Response(status, headers=head, content=body))
        self._finish()

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        """Answer piece by piece."""
        del content_type, headers
        self._streaming = True
        if self.answer.done():  # cancelled
            return
        self._streams.add(self)
        self.answer.set_result(httpx2.Response(status, stream=self))

    def send_head(self) -> None:
        """Do nothing: the response has begun."""

    def write(self, chunk: bytes) -> None:
        """Send a piece of the stream."""
        self._pieces.put_nowait(chunk)

    def end(self, chunk: bytes = b"") -> None:
        """Complete the stream."""
        self._pieces.put_nowait(chunk)
        self._pieces.put_nowait(None)
        self._finish()

    def cut(self) -> None:
        """Break the stream."""
        self._is_cut = True
        self._pieces.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if self._is_cut:
            raise httpx2.ReadError("the watch was cut")

    async def aclose(self) -> None:
        """Take note that the client reads no more."""
        self._streams.discard(self)
        self.disconnected()
