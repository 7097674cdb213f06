"""The host of an embedder: it makes an embedder a worker, as `host` does for an engine.

It is shorter than `host` because an embedder keeps nothing between two batches: there are no KV events to publish and
no cache to clear, and a batch that fails does not end the worker.

`EmbeddingRequests` holds the requests that were accepted and not yet answered. One loop embeds batch after batch. Each
request gets its share of a batch as one reply, and ends with its last input.

`EmbeddingQueue` decides which inputs form the next batch: calls take turns, one input each, so that a call with one
short text does not wait behind a call with thousands. Within a call the longest inputs come first: inputs of similar
length then share a batch, and attention is one product.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.engine import api
from dynamo.protocols import blocks, encoders, instances, model_card, model_errors, wire
from dynamo.runtime import component, requests
from dynamo.worker import card as cards
from dynamo.worker import health, startup
from dynamo.worker import host as hosts

MAX_BATCH_INPUTS = 64  # also bounds a reply: 64 vectors of 8192 floats are 2 MiB
MAX_WAITING_TOKENS = 4 * 2**20  # 16 MiB
_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(encoders.EmbeddingRequest).decode
MakeEmbeddingCard = Callable[[api.EmbedderFacts], model_card.ModelCard]


class EmbeddingHost:
    """Serves one embedder at one endpoint."""

    def __init__(
        self,
        embedder: api.Embedder,
        runtime: component.DistributedRuntime,
        endpoint: instances.EndpointName,
        *,
        make_card: MakeEmbeddingCard,
        request_limit: int,
        clock: clocks.Clock,
    ) -> None:
        self._embedder = embedder
        self._runtime = runtime
        self._endpoint = endpoint
        self._make_card = make_card
        self._request_limit = request_limit
        self._clock = clock
        self._metrics = health.WorkerMetrics(endpoint, clock)
        self._metrics.follow(runtime)
        self._files = cards.FileSharing(runtime, clock)
        self._tasks = tasks.Tasks()
        self._requests: EmbeddingRequests | None = None  # from the start on
        self._is_ready = False
        self.system_port = health.SystemPort(
            endpoints=(endpoint.endpoint,),
            is_ready=lambda: self._is_ready,
            uptime_s=lambda: self._metrics.uptime_s,
            render=lambda: self._metrics.render(()),
        )

    async def start(
        self, after_load: startup.AfterLoad = startup.nothing_follows
    ) -> model_card.ModelCard:
        """Start as `Host.start` does. Raises ConfigError or EngineFailed."""
        facts = await self._embedder.start()
        await after_load()
        card = await self._files.share(self._make_card(facts), self._endpoint)
        self._requests = accepted = EmbeddingRequests(
            self._embedder,
            facts,
            limit=self._request_limit,
            counters=self._metrics,
            clock=self._clock,
        )
        self._tasks.start("embed", accepted.run(), on_death=self._hand_over)
        await self._runtime.register(self._endpoint, accepted.handle, card.record_for)
        self._is_ready = True
        _logger.info("serving embeddings of %s at %s", card.display_name, self._endpoint)
        return card

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises the error of a task that died."""
        await self._tasks.run_until(stop)

    async def stop(self, timeout_s: float, grace_s: float = 0.0) -> None:
        """Finish requests for `timeout_s` seconds and end; accept new ones for `grace_s` seconds before.

        A worker that does not serve accepts none.
        """
        grace_s = grace_s if self._is_ready else 0.0
        self._is_ready = False
        if not await self._runtime.drain(timeout_s, grace_s) and self._requests is not None:
            _logger.warning(
                "%d requests did not finish within %g s: other workers continue them",
                len(self._requests),
                timeout_s,
            )
            self._requests.hand_over(errors.WorkerLost("the worker stops: ask another"))
        await self._files.close()
        await self._tasks.close()
        await hosts.stop_engine(self._embedder, self._clock)
        await self.system_port.close()
        _logger.info("stopped")

    def _hand_over(self, death: BaseException) -> None:
        """Fail all requests because the task that answers them has died."""
        assert self._requests is not None
        self._is_ready = False
        self._requests.hand_over(errors.WorkerDied(f"the worker's engine is lost: {death}"))


class InputRef(NamedTuple):
    """One input of one call."""

    call_id: int
    number: int


class EmbeddingQueue:
    """Inputs of calls, counted in inputs and in tokens."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.num_tokens = 0
        self._max_batch_tokens = max_batch_tokens
        self._turns: deque[int] = deque()  # call ids
        self._waiting_by_call: dict[int, list[tuple[int, int]]] = {}  # (tokens, number), next last

    def __len__(self) -> int:
        return sum(map(len, self._waiting_by_call.values()))

    def add(self, call_id: int, lengths: Sequence[int]) -> None:
        """Add a call with inputs of these lengths in tokens, at least one."""
        self._waiting_by_call[call_id] = sorted((length, i) for i, length in enumerate(lengths))
        self._turns.append(call_id)
        self.num_tokens += sum(lengths)

    def drop(self, call_id: int) -> None:
        """Remove the inputs of a call that still wait; an unknown call is no error."""
        waiting = self._waiting_by_call.pop(call_id, None)
        if waiting is not None:
            self._turns.remove(call_id)
            self.num_tokens -= sum(length for length, _ in waiting)

    def take_batch(self) -> list[InputRef]:
        """Remove and return the next batch, empty if nothing waits.

        A batch keeps to the bounds in inputs and tokens, except that a single longer input is a batch of its own.
        """
        batch: list[InputRef] = []
        tokens_left = self._max_batch_tokens
        while self._turns and len(batch) < MAX_BATCH_INPUTS:
            call_id = self._turns[0]
            waiting = self._waiting_by_call[call_id]
            length, number = waiting[-1]
            if batch and length > tokens_left:
                break
            batch.append(InputRef(call_id, number))
            tokens_left -= length
            self.num_tokens -= length
            waiting.pop()
            self._turns.popleft()
            if waiting:
                self._turns.append(call_id)
            else:
                del self._waiting_by_call[call_id]
        return batch


@dataclass(slots=True)
class _Entry:
    call: requests.Call
    request: encoders.EmbeddingRequest
    num_inputs_left: int
    accepted_at: float


class EmbeddingRequests:
    """Accepts and answers embedding requests; what waits is bounded in requests and in tokens."""

    def __init__(
        self,
        embedder: api.Embedder,
        facts: api.EmbedderFacts,
        *,
        limit: int,
        counters: health.WorkerMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._embedder = embedder
        self._facts = facts
        self._limit = limit
        self._metrics = counters
        self._clock = clock
        self._queue = EmbeddingQueue(facts.max_num_batched_tokens)
        self._entry_by_id: dict[int, _Entry] = {}
        self._ids = itertools.count()
        self._has_work = asyncio.Event()
        self._refusal: errors.WorkerLost | None = None  # set: all new requests fail with it

    def __len__(self) -> int:
        return len(self._entry_by_id)

    def handle(self, call: requests.Call) -> None:
        """Accept or refuse a call; the handler of the endpoint."""
        self._metrics.request_accepted(len(call.body))
        accepted_at = self._clock.now()
        try:
            request = self._admit(call.body)
        except errors.DynamoError as error:
            self._metrics.request_ended(self._clock.now() - accepted_at, error)
            call.fail(error)
            return
        call_id = next(self._ids)
        self._entry_by_id[call_id] = _Entry(call, request, len(request.inputs), accepted_at)
        self._queue.add(call_id, list(map(blocks.count, request.inputs)))
        self._has_work.set()

        def cancel() -> None:
            self._release(call_id, errors.Cancelled("the caller went away"))

        call.on_cancel(cancel)

    def hand_over(self, refusal: errors.WorkerLost) -> None:
        """Fail all requests, and all new ones, so that other workers answer them."""
        self._refusal = refusal
        for call_id in list(self._entry_by_id):
            if (entry := self._release(call_id, refusal)) is not None:
                entry.call.fail(refusal)

    async def run(self) -> None:
        """Embed batch after batch, until cancelled."""
        while True:
            await self._has_work.wait()
            batch = self._queue.take_batch()
            if not batch:
                self._has_work.clear()
                continue
            await self._embed(batch)

    def _admit(self, body: msgspec.Raw) -> encoders.EmbeddingRequest:
        if self._refusal is not None:
            raise errors.WorkerLost(str(self._refusal))
        if len(self._entry_by_id) >= self._limit or self._queue.num_tokens > MAX_WAITING_TOKENS:
            raise errors.Overloaded("Server overloaded: worker at capacity")
        try:
            request = _decode(body)
        except wire.DECODE_ERRORS as error:
            raise errors.RemoteProtocolError(f"expected a request to embed: {error}") from error
        _check(request, self._facts)
        return request

    async def _embed(self, batch: Sequence[InputRef]) -> None:
        batch_requests = [self._entry_by_id[ref.call_id].request for ref in batch]
        inputs = [
            api.EmbedInput(request.inputs[ref.number], request.dimensions)
            for ref, request in zip(batch, batch_requests, strict=True)
        ]
        try:
            vectors = await self._embedder.embed(inputs)
        except errors.DynamoError as error:
            for call_id in {ref.call_id for ref in batch}:
                entry = self._release(call_id, error)
                if entry is not None:
                    entry.call.fail(error)
            return
        vectors_by_call: dict[int, dict[int, bytes]] = {}
        for ref, vector in zip(batch, vectors, strict=True):
            vectors_by_call.setdefault(ref.call_id, {})[ref.number] = vector
        for call_id, vector_by_number in vectors_by_call.items():
            self._reply(call_id, vector_by_number)

    def _reply(self, call_id: int, vector_by_number: dict[int, bytes]) -> None:
        entry = self._entry_by_id.get(call_id)
        if entry is None:
            return  # its caller left while the batch was computed
        entry.call.reply(
            encoders.Vectors(tuple(vector_by_number), b"".join(vector_by_number.values()))
        )
        entry.num_inputs_left -= len(vector_by_number)
        if not entry.num_inputs_left:
            self._release(call_id, None)
            entry.call.finish()

    def _release(self, call_id: int, error: errors.DynamoError | None) -> _Entry | None:
        entry = self._entry_by_id.pop(call_id, None)
        if entry is not None:
            self._queue.drop(call_id)
            self._metrics.request_ended(self._clock.now() - entry.accepted_at, error)
        return entry


def _check(request: encoders.EmbeddingRequest, facts: api.EmbedderFacts) -> None:
    """Raise RequestError for a request that would harm others in its batch; frontends refuse it in their own words."""
    full_dimensions = facts.vectors.dimensions
    if request.dimensions is not None and not 1 <= request.dimensions <= full_dimensions:
        raise errors.InvalidRequest.of_param(
            "dimensions", f"expected from 1 to {full_dimensions}, got {request.dimensions}"
        )
    if not request.inputs:
        raise errors.InvalidRequest.of_param("input", "expected at least one, got none")
    for token_ids in request.inputs:
        _check_input(token_ids, facts)


def _check_input(token_ids: bytes, facts: api.EmbedderFacts) -> None:
    if not token_ids or len(token_ids) % blocks.TOKEN_BYTES:
        raise errors.InvalidRequest.of_param(
            "input", f"expected packed token ids, at least one, got {len(token_ids)} bytes"
        )
    if blocks.count(token_ids) > facts.context_length:
        raise model_errors.ContextTooLong.of_param(
            "input",
            f"expected at most {facts.context_length} tokens, got {blocks.count(token_ids)}",
        )
    if facts.vocab_size is not None and max(blocks.unpack(token_ids)) >= facts.vocab_size:
        raise errors.InvalidRequest.of_param(
            "input",
            f"expected token ids below {facts.vocab_size}, got {max(blocks.unpack(token_ids))}",
        )
