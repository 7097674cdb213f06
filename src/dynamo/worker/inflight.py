"""The requests that this worker has taken and not yet answered in full: between the request plane and the engine.

A call comes in, is decoded, admitted and given to the engine; the outputs of each engine step go back to their calls,
all in one turn of the event loop, so that the request plane makes one frame of them per peer. A call ends when all its
`n` choices ended, when the engine gives it up, or when its caller goes away (then the engine is told to stop).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.protocols import blocks, generate
from dynamo.runtime import requests
from dynamo.worker import metrics

_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(generate.Request).decode


@dataclass(slots=True)
class _Entry:
    call: requests.Call
    choices: set[int]  # that have not ended
    taken_at: float


class InFlight:
    """Takes calls and answers them; what it holds is bounded by `limit`."""

    def __init__(
        self, engine: api.Engine, *, limit: int, counts: metrics.WorkerMetrics, clock: clocks.Clock
    ) -> None:
        self._engine = engine
        self._limit = limit
        self._counts = counts
        self._clock = clock
        self._entry_by_id: dict[str, _Entry] = {}
        self._num_renamed = 0
        self._closed: errors.WorkerLost | None = None  # why nothing is taken any more
        self._is_empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entry_by_id)

    def take(self, call: requests.Call) -> None:
        """The handler of the `generate` endpoint."""
        self._counts.taken(len(call.body))
        taken_at = self._clock.now()
        try:
            request = self._admit(call)
            self._entry_by_id[request.id] = _Entry(
                call, set(range(request.sampling_options.n)), taken_at
            )
            self._submit(request)
        except errors.DynamoError as error:
            self._counts.ended(self._clock.now() - taken_at, error)
            _logger.debug("refused a request: %s", error)
            call.fail(error)
        else:
            _logger.debug("took %s: %d prompt tokens", request.id, request.prompt_len)
            call.on_cancel(lambda: self._cancelled(request.id))
            if request.sampling_options.n > 1:
                call.on_choice_cancel(lambda index: self._choice_cancelled(request.id, index))

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """What one engine step brought."""
        for request_id, output in batch:
            entry = self._entry_by_id.get(request_id)
            if entry is None:
                continue  # its caller left while the step ran
            entry.call.send(output)
            if output.finish_reason is not None:
                self._choice_ended(request_id, output.index)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """The engine gives one request up."""
        if request_id in self._entry_by_id:
            self._release(request_id, error).call.fail(error)

    async def leave(self, reason: errors.WorkerLost, timeout_s: float) -> None:
        """Take nothing more, finish what runs, and give back what has not ended by then."""
        self._closed = reason
        try:
            async with asyncio.timeout(timeout_s):
                while self._entry_by_id:
                    self._is_empty.clear()
                    await self._is_empty.wait()
        except TimeoutError:
            _logger.warning("%d requests did not finish within %g s", len(self), timeout_s)
            self.give_back(reason)

    def come_back(self) -> None:
        """Take requests again."""
        self._closed = None

    def give_back(self, reason: errors.WorkerLost) -> None:
        """Fail all requests, and all that still come: another worker shall answer them."""
        self._closed = reason
        for request_id in list(self._entry_by_id):
            self.failed(request_id, reason)
            self._engine.abort(request_id)

    def _admit(self, call: requests.Call) -> generate.Request:
        if self._closed is not None:
            raise errors.WorkerLost(str(self._closed))
        if len(self._entry_by_id) >= self._limit:
            raise errors.Overloaded("Server overloaded: worker at capacity")
        request = decode(call.body)
        if request.id in self._entry_by_id:  # a caller may choose ids; the engine needs them unique
            self._num_renamed += 1
            request = msgspec.structs.replace(request, id=f"{request.id}#{self._num_renamed}")
        return request

    def _submit(self, request: generate.Request) -> None:
        try:
            self._engine.submit(request)
        except errors.DynamoError:
            del self._entry_by_id[request.id]
            raise

    def _cancelled(self, request_id: str) -> None:
        if request_id in self._entry_by_id:
            self._release(request_id, errors.Cancelled("the caller went away"))
            self._engine.abort(request_id)

    def _choice_cancelled(self, request_id: str, index: int) -> None:
        entry = self._entry_by_id.get(request_id)
        if entry is not None and index in entry.choices:
            self._engine.abort_choice(request_id, index)
            self._choice_ended(request_id, index)

    def _choice_ended(self, request_id: str, index: int) -> None:
        entry = self._entry_by_id[request_id]
        entry.choices.discard(index)
        if not entry.choices:
            self._release(request_id, None)
            entry.call.finish()

    def _release(self, request_id: str, error: errors.DynamoError | None) -> _Entry:
        entry = self._entry_by_id.pop(request_id)
        self._counts.ended(self._clock.now() - entry.taken_at, error)
        if not self._entry_by_id:
            self._is_empty.set()
        return entry


def decode(body: msgspec.Raw) -> generate.Request:
    """The request in a call. Raises RemoteProtocolError (no request) or InvalidRequest (it makes no sense)."""
    try:
        request = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.RemoteProtocolError(f"expected a request to generate: {error}") from error
    if not request.token_ids or len(request.token_ids) % blocks.TOKEN_BYTES:
        raise errors.InvalidRequest(
            f"expected token ids of {blocks.TOKEN_BYTES} bytes each, at least one; "
            f"got {len(request.token_ids)} bytes",
            param="token_ids",
        )
    if request.sampling_options.n < 1:
        raise errors.InvalidRequest(
            f"expected n of at least 1, got {request.sampling_options.n}", param="n"
        )
    return request
