"""The standalone router: the same decisions for those who do not make them themselves.

It follows the workers of one endpoint and answers, at `dyn://NAMESPACE.router.…`:

    generate             a request as workers take it: routed, and the answer passed through
    best_worker_id       `Question`: which worker should get these tokens
    mark_prefill_complete, free    what became of a request that `best_worker_id` was asked to count
    dump                 what the index knows, a stretch of blocks (`Held`) at a time

A caller that asks `best_worker_id` with a `request_id` and `update_states` promises to tell of its end.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dynamo.base import errors, tasks
from dynamo.protocols import blocks, generate, instances, kv_events, model_card
from dynamo.router import kv_router, route, route_factory
from dynamo.runtime import component, requests

Q = TypeVar("Q")
_logger = logging.getLogger(__name__)
_decode_record = msgspec.json.Decoder(model_card.CardRecord).decode
_decode_request = msgspec.msgpack.Decoder(generate.Request).decode


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker should get these tokens? Packed (`blocks.pack`), or as a list of ids."""

    token_ids: bytes | list[int]
    lora_name: str | None = None  # the adapter that computes them
    request_id: str | None = None
    update_states: bool = False  # count it as in flight, under `request_id`, until `free`


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """This one, which is believed to hold so many of the prompt's blocks."""

    worker_id: int
    dp_rank: int
    overlap_blocks: float


class Held(msgspec.Struct, frozen=True):
    """A part of the index: consecutive blocks that a worker holds, by sequence hash."""

    worker_id: int
    dp_rank: int
    tier: kv_events.Tier
    sequence_hashes: list[int]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was counted."""

    request_id: str


class RouterService:
    """Routes to one endpoint for others."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        target: instances.EndpointName,
        made: route_factory.RouteFactory,
    ) -> None:
        self._runtime = runtime
        self._target = target
        self._routes = made
        self._client = runtime.client(target)
        self._cards: dict[int, model_card.ModelCard] = {}
        self._router: kv_router.KvRouter | None = None
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Be found and answer."""
        answers: dict[str, requests.Handler] = {
            "generate": self._generate,
            "best_worker_id": self._replies(Question, self._best_worker),
            "mark_prefill_complete": self._replies(About, self._mark_prefill_complete),
            "free": self._replies(About, self._free),
            "dump": self._dump,
        }
        for endpoint, handler in answers.items():
            name = instances.EndpointName(self._target.namespace, "router", endpoint)
            await self._runtime.register(name, handler)
        self._tasks.start("watch model cards", self._watch())
        _logger.info("routing to %s", self._target)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`. Raises what a task died of."""
        await self._tasks.run_until(stop)

    async def close(self) -> None:
        """End."""
        await self._tasks.close()
        await self._routes.close()

    async def _watch(self) -> None:
        prefix = f"{instances.CARDS}{self._target.path}/"
        async for change in self._runtime.discovery.watch(prefix):
            try:
                instance_id = int(change.key.removeprefix(prefix), 16)
                value = getattr(change, "value", None)
                card = None if value is None else _decode_record(value).card_json
            except ValueError as error:  # msgspec's are some too
                _logger.warning("ignored the model card %s: %s", change.key, error)
                continue
            self._apply(instance_id, card)

    def _apply(self, instance_id: int, card: model_card.ModelCard | None) -> None:
        if card is None:
            self._cards.pop(instance_id, None)
        else:
            self._cards[instance_id] = card
            if self._router is None:
                self._router = self._routes.make_kv_router(self._client, card)
        if self._router is not None:
            self._router.set_model_cards(self._cards)

    @property
    def _known(self) -> kv_router.KvRouter:
        if self._router is None:
            raise errors.NoWorkers(f"nobody serves {self._target}: start a worker for it")
        return self._router

    def _replies(self, question: type[Q], answer: Callable[[Q], Any]) -> requests.Handler:
        """A handler that answers once, at once."""
        decode = msgspec.msgpack.Decoder(question).decode

        def handle(call: requests.Call) -> None:
            try:
                call.reply(answer(decode(call.body)))
            except errors.DynamoError as error:
                call.fail(error)
            except msgspec.DecodeError as error:
                call.fail(errors.InvalidRequest(f"expected a {question.__name__}: {error}"))
            else:
                call.finish()

        return handle

    def _best_worker(self, question: Question) -> Answer:
        packed = question.token_ids
        if isinstance(packed, list):
            packed = blocks.pack(packed)
        key = question.request_id if question.update_states else None
        decision = self._known.decide(packed, key, question.lora_name)
        return Answer(
            worker_id=decision.worker.instance_id,
            dp_rank=decision.worker.dp_rank,
            overlap_blocks=decision.overlap_blocks,
        )

    def _mark_prefill_complete(self, about: About) -> dict[str, str]:
        self._known.prefill_completed(about.request_id)
        return {"status": "success"}

    def _free(self, about: About) -> dict[str, str]:
        self._known.free(about.request_id)
        return {"status": "success"}

    def _dump(self, call: requests.Call) -> None:
        for worker, tier, hashes in self._routes.holdings(self._target):
            call.reply(Held(worker.instance_id, worker.dp_rank, tier, list(hashes)))
        call.finish()

    def _generate(self, call: requests.Call) -> None:
        try:
            request = _decode_request(call.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            call.fail(errors.RemoteProtocolError(f"expected a request to generate: {error}"))
            return
        task = self._tasks.start(f"route {request.id}", self._forward(call, request))
        call.on_cancel(lambda: _cancel(task))

    async def _forward(self, call: requests.Call, request: generate.Request) -> None:
        try:
            terms = route.RoutingOptions(
                headers=call.headers, among=self._known.having(request.lora_name)
            )
            stream = await self._known.open(request, _Passing(call), terms)
        except errors.DynamoError as error:
            call.fail(error)
        else:
            call.on_cancel(stream.cancel)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


class _Passing:
    """A receiver that passes everything on."""

    def __init__(self, call: requests.Call) -> None:
        self._call = call
        self.receive = call.send
        self.replied = call.reply

    def ended(self, error: errors.DynamoError | None) -> None:
        if error is None:
            self._call.finish()
        else:
            self._call.fail(error)
