"""The object store in JetStream: one bucket that all processes share.

    bucket   dynamo-files
    URL      nats://dynamo-files/{key}

An object is put anew when a third of its time is over, by whoever needs it to stay; the others find it fresh. While it
is put anew its chunks change, so a reader that comes between tries once more.
"""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator

import nats.errors
from nats.js import api
from nats.js import errors as js_errors
from nats.js.object_store import ObjectStore

from dynamo.base import errors
from dynamo.runtime import object_store
from dynamo.runtime.backends.nats import connection

BUCKET = "dynamo-files"
PUT_S = 60.0
_SCHEME = f"nats://{BUCKET}/"
_STREAM_EXISTS = 10058  # with other bounds


class NatsObjectStore:
    """One process's way to the bucket, which is made when something is put."""

    def __init__(
        self,
        to_nats: connection.Connection,
        bounds: object_store.Bounds = object_store.Bounds(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._nats = to_nats
        self._bounds = bounds

    async def put(self, key: str, body: bytes) -> str:
        """See `object_store.ObjectStore`."""
        object_store.check_length(body, self._bounds)
        async with self._answered(PUT_S):
            bucket = await self._bucket()
            if not await self._is_fresh(bucket, key):
                await bucket.put(key, body)
        return f"{_SCHEME}{key}"

    async def get(self, url: str, *, timeout_s: float) -> bytes:
        """See `object_store.ObjectStore`."""
        key = url.removeprefix(_SCHEME)
        if key == url:
            raise errors.Unavailable(f"{url}: expected an object of {_SCHEME}")
        async with self._answered(timeout_s):
            bucket = await self._nats.jetstream.object_store(BUCKET)
            with contextlib.suppress(js_errors.Error, TimeoutError):
                async with asyncio.timeout(timeout_s / 2):
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
            return await jetstream.object_store(BUCKET)  # of another version of ours

    async def _is_fresh(self, bucket: ObjectStore, key: str) -> bool:
        try:
            put_at = (await bucket.get_info(key)).mtime
        except js_errors.NotFoundError:
            return False
        now = datetime.datetime.now(datetime.UTC)
        return put_at is not None and _age_s(put_at, now) < self._bounds.fresh_s

    @contextlib.asynccontextmanager
    async def _answered(self, within_s: float) -> AsyncIterator[None]:
        """Whatever goes wrong with the server has one name, but for one that is full."""
        addresses = self._nats.addresses
        try:
            async with asyncio.timeout(within_s):
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


def _age_s(put_at: datetime.datetime | str, now: datetime.datetime) -> float:
    at = datetime.datetime.fromisoformat(put_at) if isinstance(put_at, str) else put_at
    return (now - at).total_seconds()
