"""The standalone router: the decisions of a KV router as a service for other processes.

It follows the workers of one endpoint and serves, at `dyn://NAMESPACE.router.…`:

    generate                 a request as workers take it: routed, and the response passed through
    best_worker_id           `BestWorkerRequest`: which worker should get these tokens
    mark_prefill_complete    `SequenceUpdate`: the prompt of a request counted by `best_worker_id` is computed
    free                     `SequenceUpdate`: such a request has ended
    dump                     the content of the index, one run of blocks (`CachedRun`) at a time

A caller that sends `best_worker_id` with a `request_id` and `update_states` promises to report the request's end
(`endpoint_router` says what follows if it does not).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import blocks, generate, instances, kv_events, wire
from dynamo.router import endpoint_router, route_factory
from dynamo.runtime import component, requests

Body = TypeVar("Body")
_logger = logging.getLogger(__name__)
_decode_request = msgspec.msgpack.Decoder(generate.Request).decode


class BestWorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the best worker of a prompt: tokens packed by `blocks.pack`, or as a list of ids."""

    token_ids: bytes | list[int]
    lora_name: str | None = None  # LoRA adapter that computes them
    cache_salt: str | None = None  # that of the request: blocks under another one are not for it
    request_id: str | None = None
    update_states: bool = False  # count it as in flight, under `request_id`, until `free`


class BestWorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The best worker, and how many of the prompt's blocks it is expected to have cached."""

    worker_id: int
    dp_rank: int
    overlap_blocks: float


class CachedRun(msgspec.Struct, frozen=True):
    """A part of the index: consecutive blocks in a tier of a worker, by sequence hash."""

    worker_id: int
    dp_rank: int
    tier: kv_events.Tier
    sequence_hashes: list[int]


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The id of a request that `best_worker_id` counted."""

    request_id: str


class RouterService:
    """Serves the decisions for one endpoint of workers."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        target: instances.EndpointName,
        factory: route_factory.RouteFactory,
        clock: clocks.Clock,
    ) -> None:
        self._runtime = runtime
        self._target = target
        self._workers = endpoint_router.EndpointRouter(runtime, target, factory, clock)
        self._tasks = tasks.Tasks()  # one for each request that is routed

    async def start(self) -> None:
        """Register all endpoints, and follow the workers' model cards."""
        await self._workers.start()
        handlers: dict[str, requests.Handler] = {
            "generate": self._generate,
            "best_worker_id": self._make_handler(BestWorkerRequest, self._best_worker),
            "mark_prefill_complete": self._make_handler(
                SequenceUpdate, self._mark_prefill_complete
            ),
            "free": self._make_handler(SequenceUpdate, self._free),
            "dump": self._dump,
        }
        for endpoint, handler in handlers.items():
            name = instances.EndpointName(self._target.namespace, "router", endpoint)
            await self._runtime.register(name, handler)
        _logger.info("routing to %s", self._target)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises the error of a failed task."""
        await self._workers.run(stop)

    async def close(self) -> None:
        """Stop all tasks and close the routes."""
        await self._tasks.close()
        await self._workers.close()

    def _make_handler(
        self, body_type: type[Body], respond: Callable[[Body], Any]
    ) -> requests.Handler:
        """Make a handler that decodes the body and replies once, at once."""
        decode = msgspec.msgpack.Decoder(body_type).decode

        def handle(call: requests.Call) -> None:
            try:
                call.reply(respond(decode(call.body)))
            except errors.DynamoError as error:
                call.fail(error)
            except wire.DECODE_ERRORS as error:
                call.fail(errors.InvalidRequest(f"expected a {body_type.__name__}: {error}"))
            else:
                call.finish()

        return handle

    def _best_worker(self, request: BestWorkerRequest) -> BestWorkerResponse:
        decision = self._workers.select_worker(
            _packed(request.token_ids),
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            request_id=request.request_id if request.update_states else None,
        )
        return BestWorkerResponse(
            worker_id=decision.worker.instance_id,
            dp_rank=decision.worker.dp_rank,
            overlap_blocks=decision.overlap_blocks,
        )

    def _mark_prefill_complete(self, update: SequenceUpdate) -> dict[str, str]:
        self._workers.mark_prefill_completed(update.request_id)
        return {"status": "success"}

    def _free(self, update: SequenceUpdate) -> dict[str, str]:
        self._workers.free_request(update.request_id)
        return {"status": "success"}

    def _dump(self, call: requests.Call) -> None:
        for worker, tier, names in self._workers.cached_runs():
            call.reply(CachedRun(worker.instance_id, worker.dp_rank, tier, list(names)))
        call.finish()

    def _generate(self, call: requests.Call) -> None:
        try:
            request = _decode_request(call.body)
        except wire.DECODE_ERRORS as error:
            call.fail(errors.RemoteProtocolError(f"expected a request to generate: {error}"))
            return
        if not request.token_ids or len(request.token_ids) % blocks.TOKEN_BYTES:
            call.fail(_no_tokens())
            return

        def fail(error: BaseException) -> None:
            name = type(error).__name__
            call.fail(errors.DynamoError(f"internal error in the router: {name}; see its log"))

        work = self._forward(call, request)
        task = self._tasks.start(f"route {request.id}", work, on_death=fail)
        call.on_cancel(lambda: _cancel(task))

    async def _forward(self, call: requests.Call, request: generate.Request) -> None:
        try:
            receiver = _ForwardingReceiver(call)
            stream = await self._workers.open_stream(request, receiver, headers=call.headers)
        except errors.DynamoError as error:
            call.fail(error)
        else:
            call.on_cancel(stream.cancel)
            call.on_signal(stream.send_signal)  # the cancel of one choice


def _packed(token_ids: bytes | list[int]) -> bytes:
    """Pack the tokens of a question, if they are not. Raises InvalidRequest."""
    try:
        packed = token_ids if isinstance(token_ids, bytes) else blocks.pack(token_ids)
    except OverflowError as error:
        raise errors.InvalidRequest(
            "expected token ids of 0 to 4294967295", param="token_ids"
        ) from error
    if len(packed) % blocks.TOKEN_BYTES:
        raise _no_tokens()
    return packed


def _no_tokens() -> errors.InvalidRequest:
    limit = f"expected token ids of {blocks.TOKEN_BYTES} bytes each, at least one"
    return errors.InvalidRequest(limit, param="token_ids")


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _ForwardingReceiver:
    """A receiver that passes the response on to the caller."""

    def __init__(self, call: requests.Call) -> None:
        self._call = call
        self.receive = call.send
        self.replied = call.reply

    def ended(self, error: errors.DynamoError | None) -> None:
        if error is None:
            self._call.finish()
        else:
            self._call.fail(error)
