"""Work queues and the object store in JetStream, NATS's storage on the server's disk, which outlives every process.

A work queue is a stream that keeps items until they are acknowledged, and one consumer that all processes share:

    stream     the queue's name, with `_` for characters that NATS does not allow in a name
    subject    {stream}.items
    consumer   worker-group (durable, pull)

A pull asks the server for one item and waits; it asks again every few seconds, because a server that restarts has
forgotten its waiting clients.

The object store is one bucket that all processes share:

    bucket   dynamo-files
    URL      nats://dynamo-files/{key}

A process that needs an object to stay puts it anew when a third of its time is over; the others find it fresh. While it
is put anew its chunks change, so a reader that comes between tries once more.
"""

import asyncio
import contextlib
import datetime
import re
from collections.abc import AsyncIterator

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.object_store import ObjectStore

from dynamo.base import errors, tasks
from dynamo.runtime import services
from dynamo.runtime.backends.nats import connection

CONSUMER = "worker-group"
BUCKET = "dynamo-files"
PUT_S = 60.0
_PULL_AGAIN_S = 5.0
_UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
_SCHEME = f"nats://{BUCKET}/"
_STREAM_EXISTS = 10058  # with other bounds


class NatsItem:
    """A `WorkItem` from a JetStream consumer. Each method raises Unavailable if NATS does not answer."""

    def __init__(self, message: Msg, addresses: str) -> None:
        self.body = message.data
        self.num_deliveries = message.metadata.num_delivered
        self._message = message
        self._addresses = addresses

    async def acknowledge(self) -> None:
        async with _translate_silence(self._addresses):
            with contextlib.suppress(nats.errors.MsgAlreadyAckdError):
                await self._message.ack_sync()

    async def keep(self) -> None:
        async with _translate_silence(self._addresses):
            with contextlib.suppress(nats.errors.MsgAlreadyAckdError):
                await self._message.in_progress()

    async def give_back(self, *, after_s: float = 0.0) -> None:
        async with _translate_silence(self._addresses):
            await self._message.nak(delay=after_s or None)


class NatsWorkQueue:
    """One process's side of a work queue. Made by `open`."""

    def __init__(
        self,
        stream: str,
        bounds: services.WorkQueueBounds,
        to_nats: connection.NatsConnection,
        subscription: JetStreamContext.PullSubscription,
    ) -> None:
        """A server that dismisses this process ends `subscription`; then `pull` raises Unavailable until `open`."""
        self._stream = stream
        self._bounds = bounds
        self._nats = to_nats
        self._addresses = to_nats.addresses
        self._subscription = subscription
        self._clock = to_nats.clock
        self._pull_lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        to_nats: connection.NatsConnection,
        name: str,
        bounds: services.WorkQueueBounds = services.WorkQueueBounds(),  # noqa: B008 (a frozen value)
    ) -> "NatsWorkQueue":
        """Join the queue of this name, which its first user creates. Raises ConfigError, Unavailable."""
        stream, jetstream = _UNUSUAL.sub("_", name), to_nats.jetstream
        try:
            async with _translate_silence(to_nats.addresses):
                await _make_stream(jetstream, stream, bounds)
                await jetstream.add_consumer(
                    stream,
                    api.ConsumerConfig(
                        durable_name=CONSUMER,
                        ack_policy=api.AckPolicy.EXPLICIT,
                        ack_wait=bounds.acknowledge_s,
                        max_ack_pending=bounds.max_items,
                    ),
                )
                subscription = await jetstream.pull_subscribe_bind(CONSUMER, stream)
        except js_errors.ServiceUnavailableError as error:
            raise errors.ConfigError(
                f"NATS at {to_nats.addresses} has no JetStream, which work queues need: start nats-server with -js"
            ) from error
        except js_errors.APIError as error:
            raise errors.ConfigError(
                f"NATS at {to_nats.addresses} refuses the work queue {name}: {error.description}"
            ) from error
        return cls(stream, bounds, to_nats, subscription)

    async def push(self, body: bytes) -> None:
        services.check_item_length(body, self._bounds)
        try:
            async with _translate_silence(self._addresses):
                await self._nats.jetstream.publish(f"{self._stream}.items", body)
        except js_errors.APIError as error:
            raise errors.Overloaded(
                f"the work queue {self._stream} is full; try later: {error}"
            ) from error

    async def pull(self, timeout_s: float) -> NatsItem | None:
        async with (
            self._pull_lock,
            _translate_missing_stream(self._stream),
            _translate_silence(self._addresses),
        ):
            until = self._clock.now() + timeout_s
            while (left_s := until - self._clock.now()) > 0:
                with contextlib.suppress(nats.errors.TimeoutError):
                    messages = await self._subscription.fetch(1, min(left_s, _PULL_AGAIN_S))
                    return NatsItem(messages[0], self._addresses)
        return None

    async def depth(self) -> int:
        async with _translate_missing_stream(self._stream), _translate_silence(self._addresses):
            return (await self._nats.jetstream.stream_info(self._stream)).state.messages

    async def num_waiting(self) -> int:
        async with _translate_missing_stream(self._stream), _translate_silence(self._addresses):
            return (
                await self._nats.jetstream.consumer_info(self._stream, CONSUMER)
            ).num_pending or 0

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # the connection is closed already
            await self._subscription.unsubscribe()


class NatsObjectStore:
    """One process's access to the bucket, which the first put creates."""

    def __init__(
        self,
        to_nats: connection.NatsConnection,
        bounds: services.ObjectStoreBounds = services.ObjectStoreBounds(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._nats = to_nats
        self._bounds = bounds

    async def put(self, key: str, body: bytes) -> str:
        services.check_object_length(body, self._bounds)
        async with self._translate(PUT_S):
            bucket = await self._bucket()
            if not await self._is_fresh(bucket, key):
                await bucket.put(key, body)
        return f"{_SCHEME}{key}"

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        key = url.removeprefix(_SCHEME)
        if key == url:
            raise errors.Unavailable(f"{url}: expected an object of {_SCHEME}")
        async with self._translate(timeout_s):
            bucket = await self._nats.jetstream.object_store(BUCKET)
            with contextlib.suppress(js_errors.Error, TimeoutError):
                async with self._nats.clock.timeout(timeout_s / 2):
                    return await self._read(bucket, key)
            return await self._read(bucket, key)

    async def _read(self, bucket: ObjectStore, key: str) -> bytes:
        size = (await bucket.get_info(key)).size or 0
        if size > self._bounds.max_object_bytes:
            raise errors.Unavailable(
                f"{_SCHEME}{key} has {size} bytes, expected at most {self._bounds.max_object_bytes}"
            )
        return bytes((await bucket.get(key)).data or b"")

    async def _bucket(self) -> ObjectStore:
        bounds = api.ObjectStoreConfig(
            ttl=self._bounds.max_age_s,
            max_bytes=self._bounds.max_bytes,
            storage=api.StorageType.FILE,
        )
        jetstream = self._nats.jetstream
        try:
            return await jetstream.create_object_store(BUCKET, config=bounds)
        except js_errors.APIError as error:
            if error.err_code != _STREAM_EXISTS:
                raise
            return await jetstream.object_store(BUCKET)  # made by another version of this program

    async def _is_fresh(self, bucket: ObjectStore, key: str) -> bool:
        try:
            changed = (await bucket.get_info(key)).mtime
        except js_errors.NotFoundError:
            return False
        if changed is None:
            return False
        put_at = datetime.datetime.fromisoformat(changed) if isinstance(changed, str) else changed
        return self._nats.clock.wall() - put_at.timestamp() < self._bounds.fresh_s

    @contextlib.asynccontextmanager
    async def _translate(self, within_s: float) -> AsyncIterator[None]:
        """Raise Unavailable for all errors of the server, but Overloaded if it is full."""
        addresses = self._nats.addresses
        try:
            async with self._nats.clock.timeout(within_s):
                with tasks.keep_cancellation():
                    yield
        except js_errors.NotFoundError as error:
            raise errors.Unavailable(f"NATS at {addresses} has no such object") from error
        except js_errors.ServiceUnavailableError as error:
            raise errors.Overloaded(
                f"the object store of NATS at {addresses} takes nothing: {error}"
            ) from error
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise errors.Unavailable(
                f"the object store of NATS at {addresses}: {type(error).__name__} {error}"
            ) from error


async def _make_stream(
    jetstream: JetStreamContext, stream: str, bounds: services.WorkQueueBounds
) -> None:
    """Create the stream, or set the bounds of the existing one."""
    config = api.StreamConfig(
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
    try:
        await jetstream.add_stream(config)
    except js_errors.APIError as error:
        if error.err_code != _STREAM_EXISTS:
            raise
        await jetstream.update_stream(config)


@contextlib.asynccontextmanager
async def _translate_missing_stream(stream: str) -> AsyncIterator[None]:
    """Raise Unavailable if a server that came back without its data has lost the stream; the next `open` creates it."""
    try:
        yield
    except js_errors.APIError as error:
        raise errors.Unavailable(f"the work queue {stream} is not there: {error}") from error


@contextlib.asynccontextmanager
async def _translate_silence(addresses: str) -> AsyncIterator[None]:
    """Raise Unavailable if the server does not answer; errors in its answers pass through."""
    try:
        with tasks.keep_cancellation():  # nats-py may lose it
            yield
    except js_errors.APIError:
        raise
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise errors.Unavailable(
            f"NATS at {addresses} does not answer: {type(error).__name__} {error}"
        ) from error
