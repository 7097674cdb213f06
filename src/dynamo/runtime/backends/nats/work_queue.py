"""The work queue in JetStream: a stream that keeps items until they are acknowledged, and one consumer that all share.

    stream     the queue's name, with `_` for what NATS does not allow in a name
    subject    {stream}.items
    consumer   worker-group (durable, pull)

The stream lies on the server's disk, so items outlive the server. A pull asks the server for one item and waits; it
asks again every few seconds, because a server that restarts has forgotten who waits.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors

from dynamo.base import errors
from dynamo.runtime import work_queue
from dynamo.runtime.backends.nats import connection

CONSUMER = "worker-group"
_ASK_AGAIN_S = 5.0
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
_STREAM_EXISTS = 10058  # with other bounds


class NatsItem:
    """What was pulled."""

    def __init__(self, message: Msg, addresses: str) -> None:
        self.body = message.data
        self.num_deliveries = message.metadata.num_delivered
        self._message = message
        self._addresses = addresses

    async def acknowledge(self) -> None:
        async with _answered(self._addresses):
            with contextlib.suppress(nats.errors.MsgAlreadyAckdError):
                await self._message.ack_sync()

    async def keep(self) -> None:
        async with _answered(self._addresses):
            with contextlib.suppress(nats.errors.MsgAlreadyAckdError):
                await self._message.in_progress()

    async def give_back(self, *, after_s: float = 0.0) -> None:
        async with _answered(self._addresses):
            await self._message.nak(delay=after_s or None)


class NatsWorkQueue:
    """One party's side. Made by `open`."""

    def __init__(
        self,
        stream: str,
        bounds: work_queue.Bounds,
        addresses: str,
        jetstream: JetStreamContext,
        pulling: JetStreamContext.PullSubscription,
    ) -> None:
        self._stream = stream
        self._bounds = bounds
        self._addresses = addresses
        self._jetstream = jetstream
        self._pulling = pulling
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        to_nats: connection.Connection,
        name: str,
        bounds: work_queue.Bounds = work_queue.Bounds(),  # noqa: B008 (a frozen value)
    ) -> "NatsWorkQueue":
        """Join the queue of this name; whoever is the first makes it. Raises ConfigError, Unavailable."""
        stream, jetstream = _UNUSUAL.sub("_", name), to_nats.jetstream
        try:
            async with _answered(to_nats.addresses):
                await _make_stream(jetstream, stream, bounds)
                await jetstream.add_consumer(stream, _consumer(bounds))
                pulling = await jetstream.pull_subscribe_bind(CONSUMER, stream)
        except js_errors.ServiceUnavailableError as error:
            raise errors.ConfigError(
                f"NATS at {to_nats.addresses} has no JetStream, which work queues need: start nats-server with -js"
            ) from error
        return cls(stream, bounds, to_nats.addresses, jetstream, pulling)

    async def push(self, body: bytes) -> None:
        work_queue.check_length(body, self._bounds)
        try:
            async with _answered(self._addresses):
                await self._jetstream.publish(f"{self._stream}.items", body)
        except js_errors.APIError as error:
            raise errors.Overloaded(
                f"the work queue {self._stream} is full; try later: {error}"
            ) from error

    async def pull(self, timeout_s: float) -> NatsItem | None:
        async with self._one_at_a_time, _there(self._stream), _answered(self._addresses):
            until = asyncio.get_running_loop().time() + timeout_s
            while (left_s := until - asyncio.get_running_loop().time()) > 0:
                with contextlib.suppress(nats.errors.TimeoutError):
                    messages = await self._pulling.fetch(1, min(left_s, _ASK_AGAIN_S))
                    return NatsItem(messages[0], self._addresses)
        return None

    async def depth(self) -> int:
        async with _there(self._stream), _answered(self._addresses):
            return (await self._jetstream.stream_info(self._stream)).state.messages

    async def num_waiting(self) -> int:
        async with _there(self._stream), _answered(self._addresses):
            return (await self._jetstream.consumer_info(self._stream, CONSUMER)).num_pending or 0

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # the connection is closed already
            await self._pulling.unsubscribe()


async def _make_stream(jetstream: JetStreamContext, stream: str, bounds: work_queue.Bounds) -> None:
    """Or set the bounds of the one that is there."""
    wanted = _stream(stream, bounds)
    try:
        await jetstream.add_stream(wanted)
    except js_errors.APIError as error:
        if error.err_code != _STREAM_EXISTS:
            raise
        await jetstream.update_stream(wanted)


def _stream(stream: str, bounds: work_queue.Bounds) -> api.StreamConfig:
    return api.StreamConfig(
        name=stream,
        subjects=[f"{stream}.*"],
        retention=api.RetentionPolicy.WORK_QUEUE,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_age=bounds.max_age_s,
        max_msgs=bounds.max_items,
        max_bytes=bounds.max_bytes,
        max_msg_size=bounds.max_item_bytes,
    )


def _consumer(bounds: work_queue.Bounds) -> api.ConsumerConfig:
    return api.ConsumerConfig(
        durable_name=CONSUMER,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=bounds.acknowledge_s,
        max_ack_pending=bounds.max_items,
    )


@contextlib.asynccontextmanager
async def _there(stream: str) -> AsyncIterator[None]:
    """A server that came back without its data has forgotten us: who opens the queue makes it again."""
    try:
        yield
    except js_errors.APIError as error:
        raise errors.Unavailable(f"the work queue {stream} is not there: {error}") from error


@contextlib.asynccontextmanager
async def _answered(addresses: str) -> AsyncIterator[None]:
    """What the server says goes through; that it says nothing is Unavailable."""
    try:
        yield
    except js_errors.APIError:
        raise
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise errors.Unavailable(
            f"NATS at {addresses} does not answer: {type(error).__name__} {error}"
        ) from error
