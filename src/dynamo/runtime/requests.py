"""The seam between a process that asks and one that answers: the request plane.

The asking side opens a *stream* to an address; the answer comes back by callback, in the order it was sent, because a
task that is woken per token would cost more than everything else together. The answering side hands each stream to
the handler that is registered for its endpoint.

Implementations: `backends.memory_requests` (one process), `backends.tcp` (the default; one multiplexed connection per
pair of processes) and `backends.nats.requests`. `tests/contract/test_request_plane.py` runs one suite over all of them.

Promises: a stream ends exactly once at each side. A peer that breaks, stalls or is silent ends all its streams by
StreamBroken within `SILENCE_LIMIT_S`; nothing waits for ever. All callbacks come on the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from dynamo.base import errors
from dynamo.protocols import generate

SILENCE_LIMIT_S = 3.0
T = TypeVar("T")


class Receiver(Protocol):
    """Who gets the answer: any number of `receive` or `replied`, then one `ended`."""

    def receive(self, output: generate.Output) -> None:
        """An engine's output."""
        ...

    def replied(self, body: msgspec.Raw) -> None:
        """An item of an endpoint that does not generate."""
        ...

    def ended(self, error: errors.DynamoError | None) -> None:
        """It is complete (None), or it failed. Nothing comes after this."""
        ...


class Stream(Protocol):
    """The asking side's handle."""

    def cancel(self) -> None:
        """Stop: the peer is told, and the receiver hears nothing more, not even `ended`. Idempotent."""
        ...

    def cancel_choice(self, index: int) -> None:
        """Stop one choice of a generation: the peer is told; outputs that are on their way still come. Idempotent."""
        ...


class Call(Protocol):
    """The answering side's handle of one stream.

    What is sent within one turn of the event loop goes out as one frame per connection. Sending on a stream that is
    over, by cancellation or a broken connection, does nothing.
    """

    @property
    def endpoint(self) -> str:
        """Which endpoint was asked."""
        ...

    @property
    def body(self) -> msgspec.Raw:
        """The request, as msgpack."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What travels beside the request: request id, trace context."""
        ...

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call this once if the asker cancels, its connection breaks, or its time is over. Not after finish or fail."""
        ...

    def on_choice_cancel(self, callback: Callable[[int], None]) -> None:
        """Call this with its index whenever the asker cancels one choice. Without it they run to their end."""
        ...

    def send(self, output: generate.Output) -> None:
        """An engine's output."""
        ...

    def reply(self, value: Any) -> None:
        """An item of an endpoint that does not generate; anything that msgspec can encode."""
        ...

    def finish(self) -> None:
        """It is complete."""
        ...

    def fail(self, error: errors.DynamoError) -> None:
        """It is over, by an error; the asker gets the same class and message."""
        ...


Handler = Callable[[Call], None]


class RequestPlane(Protocol):
    """Both sides, for one process."""

    @property
    def name(self) -> str:
        """The key of our address in `Instance.transport`: tcp, memory, nats."""
        ...

    async def serve(self, endpoint: str, handler: Handler) -> str:
        """Answer streams to `endpoint` with `handler`; gives the address to publish."""
        ...

    async def open(
        self,
        address: str,
        endpoint: str,
        body: Any,
        receiver: Receiver,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Begin a stream. Raises WorkerLost if the peer cannot be reached, within a bounded time."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new streams (WorkerLost: ask another), wait for those in flight; says whether all ended in time."""
        ...

    async def close(self) -> None:
        """End everything: streams in flight break at the asker's side, handlers hear on_cancel."""
        ...


async def ask(
    plane: RequestPlane,
    address: str,
    endpoint: str,
    value: Any,
    *,
    reply_type: type[T],
    timeout_s: float,
) -> T:
    """Ask an endpoint that replies once. Raises what it failed with, or RemoteProtocolError."""
    answer = Answer()
    stream = await plane.open(address, endpoint, value, answer, timeout_s=timeout_s)
    try:
        body = await answer.body
    finally:
        stream.cancel()
    try:
        return msgspec.msgpack.decode(body, type=reply_type)
    except msgspec.DecodeError as error:
        raise errors.RemoteProtocolError(
            f"expected {reply_type.__name__} from {endpoint}: {error}"
        ) from error


class Answer:
    """The receiver of one reply, which can be awaited."""

    def __init__(self) -> None:
        self.body: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def receive(self, output: generate.Output) -> None:
        self._fail(errors.RemoteProtocolError("expected a reply, got an engine's output"))

    def replied(self, body: msgspec.Raw) -> None:
        if not self.body.done():
            self.body.set_result(body)

    def ended(self, error: errors.DynamoError | None) -> None:
        self._fail(error or errors.RemoteProtocolError("the stream ended without a reply"))

    def _fail(self, error: errors.DynamoError) -> None:
        if not self.body.done():
            self.body.set_exception(error)
