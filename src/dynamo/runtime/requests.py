"""The request plane: the interface between a process that asks (the client) and one that answers (the server).

The client opens a *stream* to an address. The answer comes back by callback, in the order it was sent, because a task
that is woken per item would cost more than everything else together. The server hands each stream to the handler that
is registered for its endpoint. `call` and `ItemReceiver` are for callers that would rather await: one answer, or an
asynchronous iterator.

A stream carries *items*, of one type for the whole plane, which its owner names when it makes the plane (a worker sends
the tokens of each step so), and *replies*, of any type, which their reader decodes.

Implementations: `backends.memory` (one process), `backends.tcp` (the default; one multiplexed connection per pair of
processes) and `backends.nats.planes`. `tests/contract/test_request_plane.py` runs one suite over all of them.

Promises: a stream ends exactly once at each side. A peer that breaks, stalls or is silent ends all its streams by
StreamBroken, a silent server within `SILENCE_LIMIT_S` (or as set), a silent client later; nothing waits for ever. All
callbacks come on the event loop's thread.
"""

import asyncio
import collections
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.observability import metrics
from dynamo.protocols import wire

SILENCE_LIMIT_S = 2.4  # so that with the way to another instance a pause stays below 3 s
MAX_BUFFERED_ITEMS = 16_384
T = TypeVar("T")


class Receiver(Protocol):
    """The client's callbacks of one stream: any number of `receive` or `replied`, then one `ended`.

    A receiver may have `receive_all`, too, which takes several items that came together.
    """

    def receive(self, item: Any) -> None:
        """Take an item of the plane's type."""
        ...

    def replied(self, body: msgspec.Raw) -> None:
        """Take a reply, as msgpack."""
        ...

    def ended(self, error: errors.DynamoError | None) -> None:
        """Take the end: the answer is complete (None), or it failed. No other call follows."""
        ...


class Stream(Protocol):
    """The client's handle of a stream. Items and end go to the `Receiver` that it was opened with."""

    def cancel(self) -> None:
        """End the stream at both sides; the receiver is not called any more, not even `ended`. Idempotent."""
        ...

    def send_signal(self, signal: int) -> None:
        """Send the handler a number with a meaning that the endpoint defines. Does nothing if the stream is over."""
        ...


class Call(Protocol):
    """The server's handle of one stream.

    All that is sent within one turn of the event loop goes out as one frame per connection. Sending on a stream that is
    over, by cancellation or a broken connection, does nothing.
    """

    @property
    def endpoint(self) -> str:
        """The path of the endpoint that the stream was opened to."""
        ...

    @property
    def body(self) -> msgspec.Raw:
        """The request, as msgpack."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's metadata, such as request id and trace context."""
        ...

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call this once if the client cancels, its connection breaks or its time is over; not after the end."""
        ...

    def on_signal(self, callback: Callable[[int], None]) -> None:
        """Call this with each signal of the client (`Stream.send_signal`). Without it signals are ignored."""
        ...

    def send(self, item: Any) -> None:
        """Send an item of the plane's type."""
        ...

    def reply(self, value: Any) -> None:
        """Send a reply: anything that msgspec can encode."""
        ...

    def finish(self) -> None:
        """End the stream: the answer is complete."""
        ...

    def fail(self, error: errors.DynamoError) -> None:
        """End the stream by an error; the client gets one of the same class and message."""
        ...


Handler = Callable[[Call], None]


class Traffic:
    """The bytes that one process exchanges on its request plane, before encryption, for the registries of metrics."""

    def __init__(self) -> None:
        self.sent = metrics.FastNumber()
        self.received = metrics.FastNumber()
        self._responses: dict[str, metrics.FastNumber] = {}

    def responses(self, endpoint: str) -> metrics.FastNumber:
        """Return the count of the bytes that answer requests to an endpoint of this process."""
        return self._responses.setdefault(endpoint, metrics.FastNumber())


class RequestPlane(Protocol):
    """Both sides of the request plane, for one process."""

    @property
    def name(self) -> str:
        """The key of this process's address in `Instance.transport`: tcp, memory, nats."""
        ...

    @property
    def traffic(self) -> Traffic:
        """The bytes that this process has sent and received."""
        ...

    async def listen(self) -> str:
        """Listen now, before anything is served; return the address to publish. Raises ConfigError."""
        ...

    async def serve(self, endpoint: str, handler: Handler) -> str:
        """Answer streams to `endpoint` with `handler`; return the address to publish."""
        ...

    def stop_serving(self, endpoint: str) -> None:
        """Refuse new streams to `endpoint` (WorkerLost: ask another) until it is served again. Idempotent."""
        ...

    async def open(  # noqa: PLR0913 (the constraints of one stream, all but four with a default)
        self,
        address: str,
        endpoint: str,
        body: Any,
        receiver: Receiver,
        *,
        instance_id: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        may_move: Callable[[], bool] | None = None,
        gives_up_early: bool = False,
    ) -> Stream:
        """Open a stream. Raises WorkerLost if the peer cannot be reached, within a bounded time.

        With `instance_id` another instance that has the address now refuses: WorkerLost.
        A peer that is silent is given up as soon as `may_move` returns True; without it, at the limit.
        With `gives_up_early` the limit is two thirds as long, for what takes its time to be done elsewhere; it holds
        while all streams to the peer ask for it.
        """
        ...

    def is_answering(self, instance_id: int, address: str | None = None) -> bool | None:
        """Return whether an instance answers on its connection, without waiting.

        False: it has ended its connection, or takes no new streams. None: unknown, because there is no connection or it
        is silent. With `address` a connection is tried, or an idle one checked, for the answer to a later question.
        """
        ...

    @property
    def is_away(self) -> bool:
        """Return whether the server through which all requests go, if this plane has one, is away."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new streams (WorkerLost: ask another) and wait for open ones; return False if some stay open."""
        ...

    async def close(self) -> None:
        """End everything: open streams break at the client's side, handlers get on_cancel."""
        ...


class ItemReceiver(Generic[T]):
    """A receiver that iterates over items and replies, in order; replies are decoded as `item_type`.

    At most `max_buffered` of them wait for their reader. The plane cannot slow a server down, so a reader that falls
    further behind gets Overloaded after those that wait.
    """

    def __init__(self, item_type: Any, *, max_buffered: int = MAX_BUFFERED_ITEMS) -> None:
        self._type_name = getattr(item_type, "__name__", str(item_type))
        self._item_class = item_type if isinstance(item_type, type) else object
        self._decode = msgspec.msgpack.Decoder(item_type).decode
        self._max_buffered = max_buffered
        self._buffer: collections.deque[Any] = collections.deque()
        self._changed = asyncio.Event()
        self.is_complete = False
        self.error: errors.DynamoError | None = None

    def receive(self, item: Any) -> None:
        if self.is_complete:
            return
        if len(self._buffer) >= self._max_buffered:
            limit = f"{self._max_buffered} items of a stream wait for its reader, which is too slow"
            self.ended(errors.Overloaded(limit))
            return
        self._buffer.append(item)
        self._changed.set()

    def replied(self, body: msgspec.Raw) -> None:
        self.receive(body)

    def ended(self, error: errors.DynamoError | None) -> None:
        if not self.is_complete:
            self.is_complete, self.error = True, error
            self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item or reply. Raises the stream's error, or RemoteProtocolError for another type."""
        while not self._buffer:
            if self.error is not None:
                raise self.error
            if self.is_complete:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        item = self._buffer.popleft()
        if isinstance(item, msgspec.Raw):
            try:
                return self._decode(item)  # type: ignore[no-any-return]
            except wire.DECODE_ERRORS as error:
                raise errors.RemoteProtocolError(
                    f"expected {self._type_name} in the answer: {error}"
                ) from error
        if isinstance(item, self._item_class):
            return item  # type: ignore[return-value]
        raise errors.RemoteProtocolError(
            f"expected {self._type_name} in the answer, got an item of type {type(item).__name__}"
        )

    async def only_item(self) -> T:
        """Wait for the first item or reply. Raises as the iteration, or RemoteProtocolError if there is none."""
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise errors.RemoteProtocolError("the stream ended without a reply") from None


async def call(
    plane: RequestPlane,
    address: str,
    endpoint: str,
    request: Any,
    *,
    reply_type: type[T],
    timeout_s: float,
    instance_id: int | None = None,
) -> T:
    """Send a request to an endpoint at an address and return its one reply; `instance_id` as in `RequestPlane.open`.

    Raises the error that it failed with, or RemoteProtocolError. `EndpointClient.call` also chooses the instance.
    """
    receiver: ItemReceiver[T] = ItemReceiver(reply_type)
    stream = await plane.open(
        address, endpoint, request, receiver, instance_id=instance_id, timeout_s=timeout_s
    )
    try:
        return await receiver.only_item()
    finally:
        stream.cancel()
