"""One connection to one etcd server: the calls that discovery needs, and its errors as ours.

It is gRPC by `grpclib`, on this process's event loop. gRPC's own library keeps eight threads and their timers beside
it, which took as much of an idle worker's processor time as all the rest, and 14 MB.

A call that gets no answer raises Unavailable, and the connection may be given up; one that etcd refuses (a password, a
permission, a value that is too large) raises ConfigError, and one for which it has no room Overloaded. Each call has a
deadline.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import grpclib
import h2.exceptions
from google.protobuf.message import DecodeError
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from dynamo.base import addresses, errors
from dynamo.runtime.backends.etcd import access
from dynamo.runtime.backends.etcd import etcd_pb2 as messages
from dynamo.runtime.discovery import Change, Delete, Put

T = TypeVar("T")

CALL_S = 3.0
PAGE_KEYS = 256  # a read fetches that many at once: a model card may have tens of kilobytes
VALUE_LIMIT = 1 << 20  # etcd takes 1.5 MiB a request
_PROBE = b"v1/"  # the prefix of all keys, and of the permissions that a careful operator gives
_END_OF_KEYS = b"\0"  # as the end of a range, by etcd's rule
_PACKAGE = "/etcdserverpb."
_WATCH = _PACKAGE + "Watch/Watch"
_KEEP_ALIVE = _PACKAGE + "Lease/LeaseKeepAlive"
_LAST_CHANGE = 2  # a comparison's target
_DELETION = 1  # an event's type
_LEADER = ("hasleader", "true")  # a server that has lost its cluster ends the watches
_REFUSALS = (
    grpclib.Status.INVALID_ARGUMENT,
    grpclib.Status.PERMISSION_DENIED,
    grpclib.Status.FAILED_PRECONDITION,
)
_NO_ANSWER = (
    OSError,  # TLS and the end of a deadline, too
    StreamTerminatedError,
    h2.exceptions.H2Error,
    ProtocolError,  # of its peer
    DecodeError,
    AssertionError,  # grpclib's, for an answer that ends in its middle
)
_WITHOUT_TLS = "it may want TLS: https:// in ETCD_ENDPOINTS"
_WITH_TLS = "it may have no TLS, or want a client certificate: ETCD_AUTH_CLIENT_CERT"
_NEW_RIGHTS = "auth store is old"  # users or roles have changed: log in anew


class HistoryLost(Exception):
    """etcd no longer has the changes since that revision: read the prefix anew."""


class EtcdConnection:
    """The calls to one server. Made by `connect`."""

    def __init__(self, channel: Channel, address: str) -> None:
        self.address = address
        self._channel = channel
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._is_open = True

    def close(self) -> None:
        """Close it; calls raise Unavailable from now on."""
        self._is_open = False
        self._channel.close()

    async def log_in(self, name: str, password: str) -> None:
        """Make all further calls as this user."""
        request = messages.AuthenticateRequest(name=name, password=password)
        answer = await self._call("Auth/Authenticate", request, messages.AuthenticateResponse)
        self._metadata = (("token", answer.token),)

    async def grant(self, lease_id: int, ttl_s: int) -> None:
        """Create a lease with this id."""
        request = messages.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)
        await self._call("Lease/LeaseGrant", request, messages.Empty)

    async def refresh(self, lease_id: int) -> bool:
        """Extend the lease to its whole time from now; return False if it does not exist (any more)."""
        request = messages.LeaseKeepAliveRequest(ID=lease_id)
        method = StreamStreamMethod(
            self._channel, _KEEP_ALIVE, type(request), messages.LeaseKeepAliveResponse
        )
        with self._translated():
            answers = await _in_own_task(method([request], timeout=CALL_S, metadata=self._metadata))
        return any(answer.TTL > 0 for answer in answers)

    async def revoke(self, lease_id: int) -> None:
        """End the lease; its keys vanish with it."""
        request = messages.LeaseRevokeRequest(ID=lease_id)
        await self._call("Lease/LeaseRevoke", request, messages.Empty)

    async def check(self) -> None:
        """Check that the server knows its cluster and lets this user read."""
        request = messages.RangeRequest(key=_PROBE, count_only=True)
        await self._call("KV/Range", request, messages.RangeResponse)

    async def put(self, key: str, value: bytes, lease_id: int, *, after: int) -> tuple[bool, int]:
        """Write a key whose last change was at revision `after`, 0 if it does not exist.

        Return whether it was written, and the revision of its last change now. A write that got no answer may still
        be on its way, and come after a later one; the revision that it names keeps it from undoing that.
        """
        if len(value) > VALUE_LIMIT:
            raise errors.ConfigError(
                f"{key}: expected at most {VALUE_LIMIT} bytes for etcd, got {len(value)}"
            )
        writing = messages.PutRequest(key=key.encode(), value=value, lease=lease_id)
        reading = messages.RangeRequest(key=key.encode(), keys_only=True)
        request = messages.TxnRequest(
            compare=[_is_of_revision(key, after)],
            success=[messages.RequestOp(request_put=writing)],
            failure=[messages.RequestOp(request_range=reading)],
        )
        answer = await self._call("KV/Txn", request, messages.TxnResponse)
        if answer.succeeded:
            return True, answer.header.revision
        kvs = answer.responses[0].response_range.kvs
        return False, kvs[0].mod_revision if kvs else 0

    async def delete(self, key: str, *, after: int) -> None:
        """Remove a key, if its last change was at this revision."""
        removal = messages.RequestOp(
            request_delete_range=messages.DeleteRangeRequest(key=key.encode())
        )
        request = messages.TxnRequest(compare=[_is_of_revision(key, after)], success=[removal])
        await self._call("KV/Txn", request, messages.TxnResponse)

    async def read(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Return all keys under a prefix, and the revision of etcd at which they were so."""
        start, end = _range(prefix)
        living: dict[str, bytes] = {}
        revision = 0
        while True:
            request = messages.RangeRequest(
                key=start, range_end=end, limit=PAGE_KEYS, revision=revision
            )
            page = await self._call("KV/Range", request, messages.RangeResponse)
            living |= {_text(kv.key): kv.value for kv in page.kvs}
            revision = revision or page.header.revision
            if not page.more:
                return living, revision
            start = page.kvs[-1].key + b"\0"

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Sequence[Change]]:
        """Iterate over the changes under a prefix from this revision on, in batches. Raises HistoryLost."""
        start, end = _range(prefix)
        request = messages.WatchCreateRequest(
            key=start, range_end=end, start_revision=revision, fragment=True
        )
        method = StreamStreamMethod(
            self._channel, _WATCH, messages.WatchRequest, messages.WatchResponse
        )
        with self._translated():
            async with method.open(metadata=(*self._metadata, _LEADER)) as stream:
                await _in_own_task(
                    stream.send_message(messages.WatchRequest(create_request=request))
                )
                while (answer := await _in_own_task(stream.recv_message())) is not None:
                    self._check_history(answer, revision)
                    if answer.events:
                        yield [_change(event) for event in answer.events]
                raise StreamTerminatedError("it ended the watch")  # and the stream says why

    def _check_history(self, answer: Any, revision: int) -> None:
        if answer.compact_revision:
            raise HistoryLost(f"etcd has forgotten what was before {answer.compact_revision}")
        if answer.created and answer.header.revision < revision - 1:
            raise self._unavailable("it was restarted without its data")
        if answer.canceled:
            raise self._unavailable(answer.cancel_reason)

    async def _call(self, method: str, request: Any, answer: type[T]) -> T:
        call = UnaryUnaryMethod(self._channel, _PACKAGE + method, type(request), answer)
        with self._translated():
            return await _in_own_task(call(request, timeout=CALL_S, metadata=self._metadata))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if not self._is_open:  # grpclib would connect anew
            raise self._unavailable("the connection was closed")
        try:
            yield
        except grpclib.GRPCError as error:
            reason = f"{error.status.name}: {error.message}"
            if error.status in _REFUSALS and _NEW_RIGHTS not in reason:
                raise errors.ConfigError(f"etcd at {self.address} refuses: {reason}") from error
            if error.status is grpclib.Status.RESOURCE_EXHAUSTED:  # its quota, or its queue
                raise errors.Overloaded(f"etcd at {self.address} is full: {reason}") from error
            if error.status is grpclib.Status.OUT_OF_RANGE:  # between two pages
                raise HistoryLost(reason) from error
            raise self._unavailable(reason) from error
        except _NO_ANSWER as error:
            raise self._unavailable(str(error) or repr(error)) from error

    def _unavailable(self, reason: str) -> errors.Unavailable:
        return errors.Unavailable(f"etcd at {self.address}: {reason}")


@contextlib.asynccontextmanager
async def connect(settings: access.EtcdAccess, address: str) -> AsyncIterator[EtcdConnection]:
    """Connect to the server at `address`; closed at the end of the context. Raises Unavailable, ConfigError."""
    host, port = addresses.split(address)
    tls = settings.read_tls()
    etcd = EtcdConnection(Channel(host, port, ssl=tls), address)
    try:
        try:
            if settings.username is not None and settings.password is not None:
                await etcd.log_in(settings.username, settings.password)
            await etcd.check()
        except errors.Unavailable as error:
            if not isinstance(error.__cause__, StreamTerminatedError | ConnectionResetError):
                raise
            raise errors.Unavailable(
                f"{error}; {_WITHOUT_TLS if tls is None else _WITH_TLS}"
            ) from error
        yield etcd
    finally:
        etcd.close()


async def _in_own_task(call: Coroutine[Any, Any, T]) -> T:
    """Make a call of grpclib in a task of its own.

    grpclib ends a wait by cancelling the task that waits, and does not take that back (`Task.uncancel`), which groups
    of tasks and time limits would then take for the end of the task.
    """
    task = asyncio.create_task(call)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return await task


def _is_of_revision(key: str, revision: int) -> Any:
    return messages.Compare(key=key.encode(), target=_LAST_CHANGE, mod_revision=revision)


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key and the end of all keys with this prefix, as etcd wants them; UTF-8 never ends in 0xff."""
    start = prefix.encode()
    return start or _END_OF_KEYS, start[:-1] + bytes([start[-1] + 1]) if start else _END_OF_KEYS


def _text(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")  # a key of another program may be anything


def _change(event: Any) -> Change:
    key = _text(event.kv.key)
    return Delete(key=key) if event.type == _DELETION else Put(key=key, value=event.kv.value)
