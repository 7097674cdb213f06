"""The answers of the semantic cache in Milvus, where several processes share them and they outlive a restart.

A process looks into its own `SemanticCache` first; only a miss there asks Milvus, by the exact key, and what Milvus has
goes into that cache, which decides by meaning and threshold as ever. It stays there for `LOCAL_S` only, so that what
another process deletes is soon gone everywhere.

No request fails by Milvus. A lookup has a bound; after a failure Milvus is set aside, and lookups miss at once, until a
write has reached it again. Writes are done by one thread in their order, so that a deletion comes after the answer that
it deletes; if too many wait, answers are dropped. A deletion returns when Milvus has confirmed it.

The client that waits is used, in threads: the asynchronous one of pymilvus 3.0 is called experimental, and cannot make
an index in milvus-lite.
"""

import asyncio
import hashlib
import logging
import math
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import grpc
import msgspec
import pymilvus

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.semantic import cache, cache_file, config, milvus_config, question_meaning

LOCAL_S = 10.0  # that an answer stays in the memory of a process
MOST_TEXT = 65_535  # bytes of a text that Milvus takes
_NUM_READERS = 4
_MOST_READING = 32  # lookups at once; one more is a miss
_MOST_PENDING = 128  # writes
_QUIET_S = 60.0  # between warnings
_RETRY_S = 5.0  # between attempts to connect
_GRACE_S = 2.0  # for pending writes when the process ends
_DELETED_AT_ONCE = 1000
_DIMENSION = 64
_MOST_WEIGHT = 1e6
# What the client raises where Milvus is away, refuses, or answers what it does not understand.
_FAILURES = (
    *(pymilvus.MilvusException, grpc.RpcError, grpc.FutureTimeoutError, msgspec.MsgspecError),
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError),
)
_logger = logging.getLogger(__name__)
for _name in ("pymilvus", "pymilvus.milvus_client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # it logs each failure, with a traceback
T = TypeVar("T")
_decode_meaning = msgspec.json.Decoder(tuple[str, question_meaning.QuestionMeaning]).decode


class StoredRow(msgspec.Struct, frozen=True):
    """A row of the collection, without its vector."""

    id: str
    tenant: str
    meaning: str  # the decision and the meaning of the question
    body: str
    expires_at: int  # milliseconds of the wall clock


class MilvusAnswers:
    """The answers of one configuration in Milvus. Its methods are called on the event loop."""

    def __init__(
        self,
        settings: config.CacheSettings,
        origin: cache_file.FileOrigin,
        clock: clocks.Clock,
        record: Callable[[str, str], None],
    ) -> None:
        """Begin to connect. `record` gets each operation and its outcome, in any thread."""
        self._settings = settings
        self._milvus = settings.milvus or milvus_config.MilvusSettings()
        self._name = self._milvus.collection.name
        self._timeout_s = self._milvus.connection.timeout
        self._clock = clock
        self._record = record
        self._prefix = _digest(msgspec.json.encode(origin))
        self._client: pymilvus.MilvusClient | None = None  # None while Milvus is set aside
        self._opened: pymilvus.MilvusClient | None = None  # the last client, of the writer's thread
        self._retry_at = -math.inf
        self._ends_at = math.inf
        self._quiet_until = -math.inf
        self._num_reading = 0
        self._num_unpruned = settings.max_entries  # the first write removes what has expired
        self._places = threading.BoundedSemaphore(_MOST_PENDING)
        self._writer = futures.ThreadPoolExecutor(1, "milvus writer")
        self._readers = futures.ThreadPoolExecutor(_NUM_READERS, "milvus reader")
        self._submit("connect", lambda _: None)

    async def find(self, key: cache.CacheKey) -> cache.StoredAnswer | None:
        """Return the answer under a key, whatever its question says; None if there is none or Milvus fails."""
        client = self._client
        if client is None or self._num_reading >= _MOST_READING:
            self._record("get", "skipped")
            return None
        self._num_reading += 1
        try:
            async with self._clock.timeout(self._milvus.lookup_timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(
                    self._readers, self._look_up, client, key
                )
        except _FAILURES as error:
            self._set_aside(client, error)
            self._record("get", "error")
            return None
        finally:
            self._num_reading -= 1

    def put(self, key: cache.CacheKey, body: bytes) -> None:
        """Store an answer, in the background."""
        meaning = msgspec.json.encode((key.decision, key.meaning))
        row = {
            "id": self._row_id(key.digest),
            "tenant": _digest(key.tenant.encode()),
            "meaning": meaning.decode(),
            "body": body.decode(),
            "expires_at": int((self._clock.wall() + self._settings.ttl_seconds) * 1000),
            "num_bytes": len(body),
            "embedding": embed(key.meaning),
        }
        if max(len(body), len(meaning)) > MOST_TEXT:
            self._record("put", "too_large")
        else:
            self._submit("put", lambda client: self._write(client, row))

    async def delete(self, digests: Iterable[bytes], tenant: str) -> set[bytes]:
        """Delete answers of a tenant and return which there were. Raises Unavailable."""
        by_id = {self._row_id(digest): digest for digest in digests}
        owner = _digest(tenant.encode())

        def delete(client: pymilvus.MilvusClient) -> set[bytes]:
            rows = self._query(
                client, self._timeout_s, ids=list(by_id), output_fields=["id", "tenant"]
            )
            found = [row["id"] for row in rows if row["tenant"] == owner]
            self._delete_rows(client, found)
            return {by_id[row_id] for row_id in found}

        return await self._confirm("delete", delete) if by_id else set()

    async def invalidate(self, tenant: str | None = None) -> int:
        """Delete all answers of a tenant, or the whole collection's; return their number. Raises Unavailable."""
        rows = "expires_at > 0"
        if tenant is not None:
            rows = f'tenant == "{_digest(tenant.encode())}"'

        def delete(client: pymilvus.MilvusClient) -> int:
            counted = self._query(client, self._timeout_s, filter=rows, output_fields=["count(*)"])
            client.delete(self._name, filter=rows, timeout=self._timeout_s)
            return int(counted[0]["count(*)"])

        return await self._confirm("invalidate", delete)

    def close(self) -> None:
        """Let pending writes have a moment, without anyone waiting for them, and then leave Milvus."""
        self._ends_at = self._clock.now() + _GRACE_S
        self._writer.submit(self._close_client)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)  # a cancelled lookup would cancel its request

    def _submit(
        self, operation: str, write: Callable[[pymilvus.MilvusClient], T]
    ) -> "futures.Future[T] | None":
        """Have the writer's thread do this; None if too much waits for it."""
        if not self._places.acquire(blocking=False):
            self._warn("writes come faster than Milvus takes them; some answers are not stored")
            self._record(operation, "dropped")
            return None
        future = self._writer.submit(self._run, operation, write)
        future.add_done_callback(lambda _: self._places.release())
        return future

    async def _confirm(self, operation: str, write: Callable[[pymilvus.MilvusClient], T]) -> T:
        future = self._submit(operation, write)
        if future is None:
            raise errors.Unavailable("Milvus is too busy to delete cached answers; ask again")
        try:
            async with self._clock.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise errors.Unavailable(
                "Milvus did not confirm that the cached answers are deleted; ask again"
            ) from error

    def _run(self, operation: str, write: Callable[[pymilvus.MilvusClient], T]) -> T:
        """Connect, if that is needed, and write, in the writer's thread. Raises Unavailable."""
        client = self._client
        try:
            if self._clock.now() > self._ends_at:
                raise TimeoutError("the process ends")
            client = client or self._connect()
            result = write(client)
        except _FAILURES as error:
            self._set_aside(client, error)
            self._record(operation, "error")
            raise errors.Unavailable(
                f"Milvus did not {operation}: {_one_line(error)}; ask again"
            ) from error
        self._record(operation, "success")
        return result

    def _connect(self) -> pymilvus.MilvusClient:
        """Return a new client of a loaded collection. Raises the client's errors, and TimeoutError between attempts."""
        if self._clock.now() < self._retry_at:
            raise TimeoutError("it was away a moment ago")
        self._retry_at = self._clock.now() + _RETRY_S
        self._close_client()
        connection, timeout_s = self._milvus.connection, self._timeout_s
        auth, tls, host = connection.auth, connection.tls, connection.host
        files = {"server_pem_path": tls.ca_file}
        if tls.cert_file:
            names = ("ca_pem_path", "client_pem_path", "client_key_path")
            files = dict(zip(names, (tls.ca_file, tls.cert_file, tls.key_file), strict=True))
        scheme, address = "https" if tls.enabled else "http", f"[{host}]" if ":" in host else host
        client = self._opened = pymilvus.MilvusClient(
            f"{scheme}://{address}:{connection.port}",
            token=f"{auth.username}:{auth.password}" if auth.enabled else "",
            db_name=connection.database,
            timeout=timeout_s,
            dedicated=True,
            **(files if tls.enabled else {}),
        )
        if not client.has_collection(self._name, timeout=timeout_s):
            self._create_collection(client)
        fields = client.describe_collection(self._name, timeout=timeout_s)["fields"]
        needed = {*StoredRow.__struct_fields__, "num_bytes", "embedding"}
        if absent := needed - {field["name"] for field in fields}:
            raise ValueError(
                f"the collection {self._name} is another program's, it has no {', '.join(sorted(absent))}: "
                "set semantic_cache.milvus.collection.name"
            )
        client.load_collection(self._name, timeout=timeout_s)
        _logger.info("the semantic cache is in Milvus at %s:%d", connection.host, connection.port)
        self._client = client
        return client

    def _create_collection(self, client: pymilvus.MilvusClient) -> None:
        settings = self._milvus.collection
        if not self._milvus.development.auto_create_collection:
            raise ValueError(f"there is no collection {self._name}, and it is not to be created")
        schema = client.create_schema(enable_dynamic_field=False, description=settings.description)
        text, number = pymilvus.DataType.VARCHAR, pymilvus.DataType.INT64
        schema.add_field("id", text, max_length=64, is_primary=True)
        schema.add_field("tenant", text, max_length=64)
        schema.add_field("meaning", text, max_length=MOST_TEXT)
        schema.add_field("body", text, max_length=MOST_TEXT)
        schema.add_field("expires_at", number)
        schema.add_field("num_bytes", number)
        schema.add_field("embedding", pymilvus.DataType.FLOAT_VECTOR, dim=_DIMENSION)
        index = client.prepare_index_params()
        index.add_index("embedding", index_type="FLAT", metric_type="IP")
        level, timeout_s = self._milvus.search.consistency_level, self._timeout_s
        try:
            client.create_collection(
                self._name,
                schema=schema,
                index_params=index,
                consistency_level=level,
                timeout=timeout_s,
            )
        except pymilvus.MilvusException:
            if not client.has_collection(self._name, timeout=timeout_s):
                raise  # else another process was quicker

    def _query(
        self, client: pymilvus.MilvusClient, timeout_s: float, level: str = "Strong", **which: Any
    ) -> list[dict[str, Any]]:
        """Return rows; those that are to be changed as they are now."""
        return list(client.query(self._name, consistency_level=level, timeout=timeout_s, **which))

    def _look_up(
        self, client: pymilvus.MilvusClient, key: cache.CacheKey
    ) -> cache.StoredAnswer | None:
        """Ask, in a reader's thread; a row that no router has stored is a miss. Raises the client's errors."""
        rows = self._query(
            client,
            self._milvus.lookup_timeout_seconds,
            self._milvus.search.consistency_level,
            ids=[self._row_id(key.digest)],
            output_fields=list(StoredRow.__struct_fields__),
        )
        answer, status = None, "miss"
        try:
            if rows and (answer := self._read_answer(rows[0], key)) is not None:
                status = "hit"
        except _FAILURES as error:
            status = "error"
            self._warn(f"a row that no router has stored: {_one_line(error)}")
        self._record("get", status)
        return answer

    def _read_answer(
        self, fields: dict[str, Any], key: cache.CacheKey
    ) -> cache.StoredAnswer | None:
        """Return what a row says, unless it has expired. Raises ValueError and others for what no router has stored."""
        row = msgspec.convert(dict(fields), StoredRow)
        decision, meaning = _decode_meaning(row.meaning)
        if (row.id, row.tenant) != (self._row_id(key.digest), _digest(key.tenant.encode())):
            raise ValueError("it has another key or tenant")
        if meaning.key != key.meaning.key:
            raise ValueError("its question has another key")
        if not all(0 < weight < _MOST_WEIGHT for weight in meaning.weights.values()):
            raise ValueError("its weights are no counts of words")
        left_s = row.expires_at / 1000 - self._clock.wall()
        found = cache.CacheKey(key.digest, key.tenant, meaning, decision)
        answer = cache.StoredAnswer(found, row.body.encode(), self._clock.now() + left_s)
        return answer if left_s > 0 else None

    def _write(self, client: pymilvus.MilvusClient, row: dict[str, Any]) -> None:
        """Write a row; after an eighth of the most entries, delete what has expired and what is too much."""
        client.upsert(self._name, [row], timeout=self._timeout_s)
        self._num_unpruned += 1
        if self._num_unpruned * 8 >= self._settings.max_entries:
            self._prune(client)
            self._num_unpruned = 0

    def _prune(self, client: pymilvus.MilvusClient) -> None:
        rows = self._query(
            client,
            self._timeout_s,
            filter="expires_at > 0",
            output_fields=["id", "expires_at", "num_bytes"],
            limit=milvus_config.MOST_ENTRIES,
        )
        rows.sort(key=lambda row: row["expires_at"], reverse=True)
        kept, num_bytes, now_ms = 0, 0, self._clock.wall() * 1000
        for row in rows:
            num_bytes += row["num_bytes"]
            is_too_much = num_bytes > self._settings.max_megabytes * 2**20
            if is_too_much or kept >= self._settings.max_entries or row["expires_at"] <= now_ms:
                break
            kept += 1
        self._delete_rows(client, [row["id"] for row in rows[kept:]])

    def _delete_rows(self, client: pymilvus.MilvusClient, ids: Sequence[str]) -> None:
        for start in range(0, len(ids), _DELETED_AT_ONCE):
            part = list(ids[start : start + _DELETED_AT_ONCE])
            client.delete(self._name, ids=part, timeout=self._timeout_s)

    def _set_aside(self, client: pymilvus.MilvusClient | None, error: BaseException) -> None:
        """Miss at once from now on, until a write has connected again. For any thread."""
        if self._client is client:
            self._client = None
        connection = self._milvus.connection
        self._warn(f"Milvus at {connection.host}:{connection.port} fails: {_one_line(error)}")

    def _warn(self, text: str) -> None:
        """Log a failure, one a minute. For any thread."""
        now = self._clock.now()
        if now >= self._quiet_until and math.isinf(self._ends_at):
            self._quiet_until = now + _QUIET_S
            _logger.warning("the semantic cache: %s; what it has there is missed", text)

    def _close_client(self) -> None:
        client, self._opened = self._opened, None
        if client is not None:
            client.close()

    def _row_id(self, digest: bytes) -> str:
        return f"{self._prefix}{digest.hex()}"


def embed(meaning: question_meaning.QuestionMeaning) -> list[float]:
    """Return the vector that Milvus demands of each row: the weights of the question's words, hashed into 64 places.

    No lookup uses it; a person can find questions with the same words by it.
    """
    vector = [0.0] * _DIMENSION
    for word, weight in meaning.weights.items():
        vector[zlib.crc32(word.encode()) % _DIMENSION] += weight
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _one_line(error: BaseException) -> str:
    """Return an error's name and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
