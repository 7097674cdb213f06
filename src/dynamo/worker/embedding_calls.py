"""The calls for embeddings that this worker has taken and not yet answered: between the request plane and the embedder.

One loop embeds batch after batch; each call gets its share of a batch as one reply, and ends with its last input.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import blocks, embed, model_errors
from dynamo.runtime import requests
from dynamo.worker import embedding_queue, metrics

MAX_WAITING_TOKENS = 4 * 2**20  # 16 MiB
_decode = msgspec.msgpack.Decoder(embed.Request).decode


@dataclass(slots=True)
class _Entry:
    call: requests.Call
    request: embed.Request
    inputs_left: int
    taken_at: float


class EmbeddingCalls:
    """Takes calls and answers them; what waits is bounded in calls and in tokens."""

    def __init__(
        self,
        embedder: api.Embedder,
        facts: api.EmbedderFacts,
        *,
        limit: int,
        counts: metrics.WorkerMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._embedder = embedder
        self._facts = facts
        self._limit = limit
        self._counts = counts
        self._clock = clock
        self._queue = embedding_queue.EmbeddingQueue(facts.max_num_batched_tokens)
        self._entry_by_id: dict[int, _Entry] = {}
        self._ids = itertools.count()
        self._has_work = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entry_by_id)

    def take(self, call: requests.Call) -> None:
        """The handler of the endpoint."""
        self._counts.taken(len(call.body))
        taken_at = self._clock.now()
        try:
            request = self._admit(call.body)
        except errors.DynamoError as error:
            self._counts.ended(self._clock.now() - taken_at, error)
            call.fail(error)
            return
        call_id = next(self._ids)
        self._entry_by_id[call_id] = _Entry(call, request, len(request.inputs), taken_at)
        self._queue.add(call_id, list(map(blocks.count, request.inputs)))
        self._has_work.set()
        call.on_cancel(lambda: self._end(call_id, errors.Cancelled("the caller went away")))

    async def run(self) -> None:
        """Embed what comes, until cancelled."""
        while True:
            await self._has_work.wait()
            batch = self._queue.take()
            if not batch:
                self._has_work.clear()
                continue
            await self._embed(batch)

    def _admit(self, body: msgspec.Raw) -> embed.Request:
        if len(self._entry_by_id) >= self._limit or self._queue.num_tokens > MAX_WAITING_TOKENS:
            raise errors.Overloaded("Server overloaded: worker at capacity")
        request = decode(body)
        _check(request, self._facts)
        return request

    async def _embed(self, batch: Sequence[embedding_queue.Place]) -> None:
        asked = [self._entry_by_id[place.call_id].request for place in batch]
        inputs = [
            api.EmbedInput(request.inputs[place.number], request.dimensions)
            for place, request in zip(batch, asked, strict=True)
        ]
        try:
            vectors = await self._embedder.embed(inputs)
        except errors.DynamoError as error:
            for call_id in {place.call_id for place in batch}:
                self._fail(call_id, error)
            return
        shares: dict[int, dict[int, bytes]] = {}
        for place, vector in zip(batch, vectors, strict=True):
            shares.setdefault(place.call_id, {})[place.number] = vector
        for call_id, share in shares.items():
            self._reply(call_id, share)

    def _reply(self, call_id: int, share: dict[int, bytes]) -> None:
        entry = self._entry_by_id.get(call_id)
        if entry is None:
            return  # its caller left while the batch was computed
        entry.call.reply(embed.Vectors(tuple(share), b"".join(share.values())))
        entry.inputs_left -= len(share)
        if not entry.inputs_left:
            self._end(call_id, None)
            entry.call.finish()

    def _fail(self, call_id: int, error: errors.DynamoError) -> None:
        entry = self._entry_by_id.get(call_id)
        if entry is not None:
            self._end(call_id, error)
            entry.call.fail(error)

    def _end(self, call_id: int, error: errors.DynamoError | None) -> None:
        entry = self._entry_by_id.pop(call_id, None)
        if entry is not None:
            self._queue.drop(call_id)
            self._counts.ended(self._clock.now() - entry.taken_at, error)


def decode(body: msgspec.Raw) -> embed.Request:
    """The request in a call. Raises RemoteProtocolError."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.RemoteProtocolError(f"expected a request to embed: {error}") from error


def _check(request: embed.Request, facts: api.EmbedderFacts) -> None:
    """Raises RequestError for what would harm others in its batch; a frontend has refused it in its own words."""
    full = facts.vectors.dimensions
    if request.dimensions is not None and not 1 <= request.dimensions <= full:
        raise errors.InvalidRequest(
            f"dimensions: expected from 1 to {full}, got {request.dimensions}", param="dimensions"
        )
    if not request.inputs:
        raise errors.InvalidRequest("input: expected at least one, got none", param="input")
    for token_ids in request.inputs:
        _check_input(token_ids, facts)


def _check_input(token_ids: bytes, facts: api.EmbedderFacts) -> None:
    if not token_ids or len(token_ids) % blocks.TOKEN_BYTES:
        raise errors.InvalidRequest(
            f"input: expected packed token ids, at least one, got {len(token_ids)} bytes",
            param="input",
        )
    if blocks.count(token_ids) > facts.context_length:
        raise model_errors.ContextTooLong(
            f"input: expected at most {facts.context_length} tokens, got {blocks.count(token_ids)}",
            param="input",
        )
    if facts.vocab_size is not None and max(blocks.unpack(token_ids)) >= facts.vocab_size:
        raise errors.InvalidRequest(
            f"input: expected token ids below {facts.vocab_size}, got {max(blocks.unpack(token_ids))}",
            param="input",
        )
