"""The requests that a worker accepted and has not answered in full: between the request plane and the engine.

A call is decoded, admitted and submitted to the engine. The outputs of each engine step go back to their calls, all in
one turn of the event loop, so that the request plane sends one frame of them per peer. A call ends when all its `n`
choices have ended, when the engine gives it up, or when its caller goes away (then the engine aborts it).

The logging context and the trace spans of a request wrap the handler of the endpoint. The spans are `handle_payload`
and, within it, `prefill` (until the first token is sent, including the time in the engine's queue) and `decode`. A call
that is not sampled reaches the handler unchanged; a sampled one costs more for its first token only.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.engine import api
from dynamo.observability import logs, tracing
from dynamo.protocols import blocks, generate, limits, trace_context, wire
from dynamo.runtime import requests
from dynamo.worker import health

_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(generate.Request).decode


@dataclass(slots=True)
class _Entry:
    call: requests.Call
    open_choices: set[int]
    accepted_at: float
    prompt_len: int  # in tokens; 0 once its answer has begun
    is_probe: bool


class InFlight:
    """Accepts calls and answers them; holds at most `limit` requests."""

    def __init__(
        self,
        engine: api.Engine,
        *,
        limit: int,
        counters: health.WorkerMetrics,
        clock: clocks.Clock,
        is_aggregated: bool = True,
    ) -> None:
        """`is_aggregated`: the engine computes all prompts itself, and the log says so."""
        self._engine = engine
        self._limit = limit
        self._metrics = counters
        self._clock = clock
        self._entry_by_id: dict[str, _Entry] = {}
        self._is_aggregated = is_aggregated
        self.num_prompt_tokens = 0  # of answers that have begun
        self.num_output_tokens = 0
        self._num_renamed = 0
        self._refusal: errors.WorkerLost | None = None  # set: all new requests fail with it
        self._is_empty = asyncio.Event()
        self.has_arrival = asyncio.Event()  # whoever waits for the next request clears it

    def __len__(self) -> int:
        return len(self._entry_by_id)

    def handle(self, call: requests.Call, *, is_probe: bool = False) -> None:
        """Accept or refuse a call; the handler of the `generate` endpoint.

        A probe of the engine is not limited, and no load: it is neither counted nor logged.
        """
        level = logging.DEBUG if is_probe else logging.INFO
        if not is_probe:
            self.has_arrival.set()
            self._metrics.request_accepted(len(call.body))
        accepted_at = self._clock.now()
        try:
            request = self._admit(call, is_limited=not is_probe)
            choices = set(range(request.sampling_options.n))
            self._entry_by_id[request.id] = _Entry(
                call, choices, accepted_at, request.prompt_len, is_probe
            )
            _logger.debug(
                'starting task to process python async generator stream request_id="%s"', request.id
            )
            if self._is_aggregated:
                _logger.log(
                    level, "Prefilling locally for request %s with length %d",
                    request.id, request.prompt_len,
                )  # fmt: skip
            try:
                self._engine.submit(request)
            except BaseException:
                del self._entry_by_id[request.id]
                raise
        except errors.DynamoError as error:
            self._count_end(accepted_at, error, is_probe=is_probe)
            _logger.debug("refused a request: %s", error)
            call.fail(error)
            self._release_remote(call)
        except BaseException:  # a bug, which the request plane logs and answers
            failure = errors.DynamoError("internal error")
            self._count_end(accepted_at, failure, is_probe=is_probe)
            raise
        else:
            _logger.log(level, "Added request %s.", request.id)
            call.on_cancel(lambda: self._cancel(request.id))
            if request.sampling_options.n > 1:
                call.on_signal(lambda index: self._cancel_choice(request.id, index))

    def outputs(self, batch: Sequence[api.EngineOutput]) -> None:
        """Send the outputs of one engine step to their calls."""
        for request_id, output in batch:
            entry = self._entry_by_id.get(request_id)
            if entry is None:
                continue  # its caller left while the step ran
            if not entry.is_probe:
                if entry.prompt_len:
                    self.num_prompt_tokens += entry.prompt_len
                    entry.prompt_len = 0
                    self._metrics.answer_began(self._clock.now() - entry.accepted_at)
                self.num_output_tokens += len(output.token_ids)
            entry.call.send(output)
            if output.finish_reason is not None:
                self._end_choice(request_id, output.index)

    def failed(self, request_id: str, error: errors.DynamoError) -> None:
        """Fail one request that the engine gave up; an unknown id is no error."""
        if request_id in self._entry_by_id:
            self._release(request_id, error).call.fail(error)

    async def drain(self, refusal: errors.WorkerLost, timeout_s: float) -> None:
        """Refuse new requests, finish running ones, and hand over those that run after `timeout_s` seconds."""
        self._refusal = refusal
        try:
            async with self._clock.timeout(timeout_s):
                while self._entry_by_id:
                    self._is_empty.clear()
                    await self._is_empty.wait()
        except TimeoutError:
            _logger.warning("%d requests did not finish within %g s", len(self), timeout_s)
            self.hand_over(refusal)

    def reopen(self) -> None:
        """Accept new requests again, after `drain`."""
        self._refusal = None

    def hand_over(self, refusal: errors.WorkerLost) -> None:
        """Fail all requests, and all new ones, so that other workers answer them."""
        self._refusal = refusal
        for request_id in list(self._entry_by_id):
            self.failed(request_id, refusal)
            self._engine.abort(request_id)

    def _admit(self, call: requests.Call, *, is_limited: bool) -> generate.Request:
        if self._refusal is not None:
            raise errors.WorkerLost(str(self._refusal))
        if is_limited and len(self._entry_by_id) >= self._limit:
            raise errors.Overloaded("Server overloaded: worker at capacity")
        request = decode(call.body)
        if request.id in self._entry_by_id:  # a caller may choose ids; the engine needs them unique
            self._num_renamed += 1
            request = msgspec.structs.replace(request, id=f"{request.id}#{self._num_renamed}")
        return request

    def _release_remote(self, call: requests.Call) -> None:
        """Let another engine free the blocks of a refused call: a caller that retries has its prompt computed anew."""
        peer = self._engine.capabilities.kv_transfer
        if peer is not None:
            with contextlib.suppress(errors.DynamoError):
                peer.release_remote(decode(call.body).kv_transfer_params)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._entry_by_id:
            self._release(request_id, errors.Cancelled("the caller went away"))
            self._engine.abort(request_id)

    def _cancel_choice(self, request_id: str, index: int) -> None:
        entry = self._entry_by_id.get(request_id)
        if entry is not None and index in entry.open_choices:
            self._engine.abort_choice(request_id, index)
            self._end_choice(request_id, index)

    def _end_choice(self, request_id: str, index: int) -> None:
        entry = self._entry_by_id[request_id]
        entry.open_choices.discard(index)
        if not entry.open_choices:
            self._release(request_id, None)
            entry.call.finish()

    def _count_end(
        self, accepted_at: float, error: errors.DynamoError | None, *, is_probe: bool
    ) -> None:
        if not is_probe:
            self._metrics.request_ended(self._clock.now() - accepted_at, error)

    def _release(self, request_id: str, error: errors.DynamoError | None) -> _Entry:
        entry = self._entry_by_id.pop(request_id)
        self._count_end(entry.accepted_at, error, is_probe=entry.is_probe)
        _logger.debug(
            'finished processing python async generator stream request_id="%s"', request_id
        )
        if not self._entry_by_id:
            self._is_empty.set()
        return entry


def decode(body: msgspec.Raw) -> generate.Request:
    """Decode and check the body of a call. Raises RemoteProtocolError (not a request) or InvalidRequest."""
    try:
        request = _decode(body)
    except wire.DECODE_ERRORS as error:
        raise errors.RemoteProtocolError(f"expected a request to generate: {error}") from error
    if not request.token_ids or len(request.token_ids) % blocks.TOKEN_BYTES:
        raise errors.InvalidRequest(
            f"expected token ids of {blocks.TOKEN_BYTES} bytes each, at least one; "
            f"got {len(request.token_ids)} bytes",
            param="token_ids",
        )
    if request.sampling_options.n not in limits.NUM_CHOICES:  # before each is noted
        raise limits.invalid("n", "from 1 to 1,024", request.sampling_options.n)
    return request


_SPAN = "handle_payload"


def logged(handler: requests.Handler) -> requests.Handler:
    """Wrap a handler so that log lines written while it handles a call name the request."""

    def handle(call: requests.Call) -> None:
        headers = call.headers
        context = logs.LogContext(_SPAN, headers.get("x-request-id"), trace_context.read(headers))
        token = logs.log_context.set(context)
        try:
            handler(call)
        finally:
            logs.log_context.reset(token)

    return handle


def traced(
    handler: requests.Handler,
    exporter: tracing.SpanExporter,
    ratio: float,
    clock: clocks.Clock,
    worker_id: int,
) -> requests.Handler:
    """Wrap a handler so that the spans of sampled calls go to the exporter; `ratio` of new traces are sampled."""

    def handle(call: requests.Call) -> None:
        trace, parent_id = tracing.start_span(call.headers, ratio=ratio)
        if trace is None or not trace.is_sampled:
            handler(call)
            return

        record = tracing.StageRecord()

        def export(ended_call: TimedCall, error: str | None) -> None:
            now = clock.now()
            wall = tracing.wall_clock(now, clock.wall())
            root = tracing.Span(
                name=_SPAN,
                context=trace,
                parent_id=parent_id,
                started_at=wall(ended_call.accepted_at),
                ended_at=wall(now),
                kind="server",
                attributes={"worker_id": f"{worker_id:x}"}
                | _attributes(ended_call)
                | record.attributes,
                error=error,
            )
            prefill = tracing.Stage("prefill", ended_call.accepted_at, ended_call.first_at)
            decode = tracing.Stage("decode", ended_call.first_at, now)
            stages = (*record.stages, prefill, decode)
            exporter.export([root, *tracing.stage_spans(trace, stages, wall)])

        token = tracing.stage_record.set(record)
        try:
            handler(TimedCall(call, clock.now, export, trace.headers()))
        finally:
            tracing.stage_record.reset(token)

    return handle


def _attributes(ended_call: "TimedCall") -> dict[str, tracing.AttributeValue]:
    """Return what a span says of its call: the request, and how many tokens of its prompt each cache had."""
    request_id = ended_call.headers.get("x-request-id")
    attributes: dict[str, tracing.AttributeValue] = {"endpoint": ended_call.endpoint}
    if request_id is not None:
        attributes["x_request_id"] = request_id
    if ended_call.first_output is not None and ended_call.first_output.cached_tokens is not None:
        attributes["cached_tokens"] = ended_call.first_output.cached_tokens
        for tier, num_tokens in ended_call.first_output.tier_tokens or ():
            attributes[f"cached_tokens.{tier}"] = num_tokens
    return attributes


class TimedCall:
    """A call that records its first output and when that is sent, and calls `on_end` at its end.

    `on_end` gets this call, and the code of an error or None. `headers` replace those of the call, so that what the
    handler begins elsewhere belongs to the span of this call.
    """

    def __init__(
        self,
        call: requests.Call,
        now: Callable[[], float],
        on_end: Callable[["TimedCall", str | None], None],
        headers: Mapping[str, str],
    ) -> None:
        self._call = call
        self._now = now
        self._on_end = on_end
        self.headers = {**call.headers, **headers}
        self.accepted_at = now()
        self.first_at: float | None = None
        self.first_output: generate.Output | None = None
        # Rebound at the first output (hot path): a later token goes to the call without a method of ours between.
        self.send: Callable[[generate.Output], None] = self._send_first

    @property
    def endpoint(self) -> str:
        return self._call.endpoint

    @property
    def body(self) -> msgspec.Raw:
        return self._call.body

    def on_cancel(self, callback: Callable[[], None]) -> None:
        def cancelled() -> None:
            callback()
            self._end("cancelled")

        self._call.on_cancel(cancelled)

    def on_signal(self, callback: Callable[[int], None]) -> None:
        self._call.on_signal(callback)

    def reply(self, value: Any) -> None:
        self._call.reply(value)

    def finish(self) -> None:
        self._call.finish()
        self._end(None)

    def fail(self, error: errors.DynamoError) -> None:
        self._call.fail(error)
        self._end(error.code)

    def _send_first(self, output: generate.Output) -> None:
        self.first_output, self.first_at = output, self._now()
        self.send = self._call.send
        self.send(output)

    def _end(self, error: str | None) -> None:
        self._on_end(self, error)
