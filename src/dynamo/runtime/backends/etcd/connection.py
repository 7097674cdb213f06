"""One connection to one etcd server: the calls that discovery needs, and its errors as ours. The one user of gRPC.

The messages and stubs are those that `aetcd` ships. Its client is not used: it knows one server and no TLS, and its
watches end with its connection; per call both cost the same.

A call that gets no answer raises Unavailable, and the connection may be given up; one that etcd refuses (a password, a
permission, a value that is too large) raises ConfigError. Each call has a deadline.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
from aetcd import rpc

from dynamo.base import errors
from dynamo.runtime.backends.etcd import access
from dynamo.runtime.discovery import Change, Delete, Put

CALL_S = 3.0
PAGE_KEYS = 256  # a read fetches that many at once: a model card may have tens of kilobytes
VALUE_LIMIT = 1 << 20  # etcd takes 1.5 MiB a request
_MESSAGE_LIMIT = 64 << 20
_PROBE = b"v1/"  # the prefix of all keys, and of the permissions that a careful operator gives
_END_OF_KEYS = b"\0"  # as the end of a range, by etcd's rule
_OPTIONS = (
    ("grpc.max_receive_message_length", _MESSAGE_LIMIT),
    ("grpc.use_local_subchannel_pool", 1),  # forget an old connection's failures
    ("grpc.enable_retries", 0),  # a call for one server must not reach the next in silence
    ("grpc.enable_http_proxy", 0),  # etcd is inside the cluster, not behind a proxy
)
_LEADER = ("hasleader", "true")  # a server that has lost its cluster ends the watches
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
)
_NEW_RIGHTS = "auth store is old"  # users or roles have changed: log in anew


class HistoryLost(Exception):
    """etcd no longer has the changes since that revision: read the prefix anew."""


class EtcdConnection:
    """The calls to one server. Made by `connect`."""

    def __init__(self, channel: Any, address: str) -> None:
        self.address = address
        self._kv = rpc.KVStub(channel)
        self._lease = rpc.LeaseStub(channel)
        self._watch = rpc.WatchStub(channel)
        self._auth = rpc.AuthStub(channel)
        self._metadata: tuple[tuple[str, str], ...] = ()

    async def log_in(self, name: str, password: str) -> None:
        """Make all further calls as this user."""
        request = rpc.AuthenticateRequest(name=name, password=password)
        answer = await self._call(self._auth.Authenticate, request)
        self._metadata = (("token", answer.token),)

    async def grant(self, lease_id: int, ttl_s: int) -> None:
        """Create a lease with this id."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)
        await self._call(self._lease.LeaseGrant, request)

    async def refresh(self, lease_id: int) -> bool:
        """Extend the lease to its whole time from now; return False if it does not exist (any more)."""
        with self._translated():
            stream = self._lease.LeaseKeepAlive(
                iter([rpc.LeaseKeepAliveRequest(ID=lease_id)]),
                timeout=CALL_S,
                metadata=self._metadata,
            )
            try:
                answer = await stream.read()
                return answer is not grpc.aio.EOF and answer.TTL > 0
            finally:
                stream.cancel()

    async def revoke(self, lease_id: int) -> None:
        """End the lease; its keys vanish with it."""
        await self._call(self._lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id))

    async def check(self) -> None:
        """Check that the server knows its cluster and lets this user read."""
        await self._call(self._kv.Range, rpc.RangeRequest(key=_PROBE, count_only=True))

    async def put(self, key: str, value: bytes, lease_id: int, *, after: int) -> tuple[bool, int]:
        """Write a key whose last change was at revision `after`, 0 if it does not exist.

        Return whether it was written, and the revision of its last change now. A write that got no answer may still
        be on its way, and come after a later one; the revision that it names keeps it from undoing that.
        """
        if len(value) > VALUE_LIMIT:
            raise errors.ConfigError(
                f"{key}: expected at most {VALUE_LIMIT} bytes for etcd, got {len(value)}"
            )
        writing = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        reading = rpc.RangeRequest(key=key.encode(), keys_only=True)
        request = rpc.TxnRequest(
            compare=[_is_of_revision(key, after)],
            success=[rpc.RequestOp(request_put=writing)],
            failure=[rpc.RequestOp(request_range=reading)],
        )
        answer = await self._call(self._kv.Txn, request)
        if answer.succeeded:
            return True, answer.header.revision
        kvs = answer.responses[0].response_range.kvs
        return False, kvs[0].mod_revision if kvs else 0

    async def delete(self, key: str, *, after: int) -> None:
        """Remove a key, if its last change was at this revision."""
        removal = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
        request = rpc.TxnRequest(compare=[_is_of_revision(key, after)], success=[removal])
        await self._call(self._kv.Txn, request)

    async def read(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return all keys under a prefix, and the revision of etcd at which they were so."""
        start, end = _range(prefix)
        living: dict[str, bytes] = {}
        revision = 0
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision)
            page = await self._call(self._kv.Range, request)
            living |= {_text(kv.key): kv.value for kv in page.kvs}
            revision = revision or page.header.revision
            if not page.more:
                return living, revision
            start = page.kvs[-1].key + b"\0"

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Sequence[Change]]:
        """Iterate over the changes under a prefix from this revision on, in batches. Raises HistoryLost."""
        start, end = _range(prefix)
        request = rpc.WatchCreateRequest(
            key=start, range_end=end, start_revision=revision, fragment=True
        )
        with self._translated():
            stream = self._watch.Watch(metadata=(*self._metadata, _LEADER))
            try:
                await stream.write(rpc.WatchRequest(create_request=request))
                while (answer := await stream.read()) is not grpc.aio.EOF:
                    self._check_history(answer, revision)
                    if answer.events:
                        yield [_change(event) for event in answer.events]
            finally:
                stream.cancel()
        raise self._unavailable("it ended the watch")

    def _check_history(self, answer: Any, revision: int) -> None:
        if answer.compact_revision:
            raise HistoryLost(f"etcd has forgotten what was before {answer.compact_revision}")
        if answer.created and answer.header.revision < revision - 1:
            raise self._unavailable("it was restarted without its data")
        if answer.canceled:
            raise self._unavailable(answer.cancel_reason)

    async def _call(self, stub: Any, request: Any) -> Any:
        with self._translated():  # a closed channel refuses already the making of the call
            return await stub(request, timeout=CALL_S, metadata=self._metadata)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() in _REFUSALS and _NEW_RIGHTS not in reason:
                raise errors.ConfigError(f"etcd at {self.address} refuses: {reason}") from error
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:  # between two pages
                raise HistoryLost(reason) from error
            raise self._unavailable(reason) from error
        except grpc.aio.UsageError as error:
            raise self._unavailable(str(error)) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # by gRPC, not by this process
            raise self._unavailable("the connection was closed") from error

    def _unavailable(self, reason: str) -> errors.Unavailable:
        return errors.Unavailable(f"etcd at {self.address}: {reason}")


@contextlib.asynccontextmanager
async def connect(settings: access.EtcdAccess, address: str) -> AsyncIterator[EtcdConnection]:
    """Connect to the server at `address`; closed at the end of the context. Raises Unavailable, ConfigError."""
    async with _channel(settings, address) as channel:
        etcd = EtcdConnection(channel, address)
        if settings.username is not None and settings.password is not None:
            await etcd.log_in(settings.username, settings.password)
        await etcd.check()
        yield etcd


def _channel(settings: access.EtcdAccess, address: str) -> Any:
    tls = settings.read_tls()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.certificate
    )
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def _is_of_revision(key: str, revision: int) -> Any:
    return rpc.Compare(
        key=key.encode(), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision
    )


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key and the end of all keys with this prefix, as etcd wants them; UTF-8 never ends in 0xff."""
    start = prefix.encode()
    return start or _END_OF_KEYS, start[:-1] + bytes([start[-1] + 1]) if start else _END_OF_KEYS


def _text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")  # a key of another program may be anything


def _change(event: Any) -> Change:
    key = _text(event.kv.key)
    return Delete(key=key) if event.type == rpc.Event.DELETE else Put(key=key, value=event.kv.value)
