"""The semantic router inside the frontend: between the body of a request and its model.

It is imported only where `--semantic-router` is set, because its libraries are an extra. Chat completions get the
router's own answers; an API of another shape gets its error where a guard refuses.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.frontend import pipeline, waiting
from dynamo.frontend.admission import authentication
from dynamo.frontend.model_registry import registry
from dynamo.observability import metrics
from dynamo.protocols import instances
from dynamo.router import explanation
from dynamo.runtime import component, events
from dynamo.runtime.http import exchange
from dynamo.semantic import (
    cache,
    encoder_client,
    model_choice,
    rewriting,
    routing_outcome,
    service,
)

_CONVERSATIONS = "semantic_router/conversations"  # the topic within a namespace
_logger = logging.getLogger(__name__)
FindWakeable = Callable[[str], instances.WorkerStart | None]
_CHAT = "chat_completions"
_APIS: dict[str, rewriting.RequestApi] = {
    _CHAT: "chat",
    "responses": "responses",
    "messages": "messages",
    "ollama_chat": "ollama",
    "ollama_generate": "ollama_generate",
    "completions": "completions",
}


class LiveModels:
    """What a frontend knows of its models, as the router asks for it."""

    def __init__(self, models: registry.ModelRegistry, find_wakeable: FindWakeable) -> None:
        self._models = models
        self._find_wakeable = find_wakeable

    def find_served(self, model: str) -> model_choice.ServedModel | None:
        """Return what a model can do that has live workers, or is woken by a request; None for any other."""
        try:
            entry = self._models.find(model)
        except errors.DynamoError:
            start = self._find_wakeable(self._models.announced_name(model))
            length = None if start is None else start.context_length or None
            return None if start is None else model_choice.ServedModel(context_length=length)
        if not entry.is_ready or not entry.can_generate:
            return None
        return model_choice.ServedModel(
            context_length=entry.card.context_length or None,
            accepts_images=entry.card.runtime_config.max_images > 0,
            chooses_tools="tools" in entry.capabilities,
            accepts_structured_output=entry.card.runtime_config.supports_guided,
        )


class ConversationTurn(msgspec.Struct, frozen=True, array_like=True):
    """The turn of a conversation that a frontend has sent to a model, as it tells the others of its namespace."""

    keys: list[str]
    decision: str
    model: str


class SharedConversations:
    """The conversations of all frontends of a namespace: each publishes its turns, and notes those of the others.

    The next turn of a conversation comes seconds later, perhaps at another frontend or another process of the same
    port. A turn that is lost, or that was answered before a frontend came, is unknown there, as after a restart.
    """

    def __init__(
        self, runtime: component.DistributedRuntime, routing: service.RoutingService
    ) -> None:
        namespace = runtime.namespace().name or encoder_client.DEFAULT_NAMESPACE
        self._topic = f"{namespace}/{_CONVERSATIONS}"
        self._runtime, self._service = runtime, routing
        self._decode = msgspec.msgpack.Decoder(ConversationTurn).decode

    async def start(self) -> None:
        """Publish to the other frontends and subscribe to them."""
        with contextlib.suppress(errors.Unavailable):  # published when discovery is back
            await self._runtime.events.advertise(self._topic)
        await self._runtime.events.subscribe(self._topic, self._take)
        loop = asyncio.get_running_loop()

        def publish(keys: Sequence[str], turn: model_choice.AnsweredTurn) -> None:
            loop.call_soon_threadsafe(self._publish, keys, turn)

        self._service.router.conversations.on_remember = publish

    def _publish(self, keys: Sequence[str], turn: model_choice.AnsweredTurn) -> None:
        message = ConversationTurn(list(keys), turn.decision, turn.model)
        self._runtime.events.publish(self._topic, msgspec.msgpack.encode(message))

    def _take(self, batch: Sequence[events.Event]) -> None:
        router = self._service.router
        for event in batch:
            if event.publisher == self._runtime.instance_id:
                continue
            try:
                turn = self._decode(event.payload)
            except msgspec.DecodeError as error:
                _logger.warning("ignored a turn of frontend %x: %s", event.publisher, error)
                continue
            if turn.model in router.model_names:  # else by another configuration
                router.conversations.note(turn.keys, turn.decision, turn.model)


class SemanticRouting:
    """Routes the requests of a frontend by what they say."""

    def __init__(
        self,
        path: str,
        models: registry.ModelRegistry,
        metrics_registry: metrics.Registry,
        clock: clocks.Clock,
        rights: authentication.ClientRights,
        find_wakeable: FindWakeable,
        worker_wait: waiting.WorkerWait,
        runtime: component.DistributedRuntime | None = None,
    ) -> None:
        """`rights` say which models a client may ask, and `find_wakeable` which lack workers on purpose.

        `worker_wait` has requests wait while no model that may answer them has a worker.

        `runtime` finds the process of the encoders, if the configuration names any, in its own namespace.
        """
        self._rights = rights
        self._models = models
        self._worker_wait = worker_wait
        self._service = service.RoutingService(
            Path(path), metrics_registry, clock, LiveModels(models, find_wakeable)
        )
        self._conversations = None
        if runtime is not None:
            self._service.connect_encoders(encoder_client.make_client(runtime))
            self._conversations = SharedConversations(runtime, self._service)

    @property
    def listed_name(self) -> str:
        return self._service.router.settings.auto_model_name

    def default_of(self, name: str) -> str:
        settings = self._service.router.settings
        return settings.default_model or name if name in settings.auto_names else name

    async def watch(self) -> None:
        """Share conversations, and reload the configuration whenever its file changes, until cancelled.

        Then close the cache's file.
        """
        try:
            if self._conversations is not None:
                await self._conversations.start()
            await self._service.loader.watch()
        finally:
            self._service.close()

    async def route(
        self,
        client: exchange.Exchange,
        endpoint: str,
        ask_again: Callable[[exchange.Exchange, bytes, pipeline.ExplainModel], None],
        read_texts: Callable[[bytes], bytes] | None = None,
        id_headers: exchange.Headers = (),
    ) -> tuple[exchange.Exchange, bytes, pipeline.ExplainModel]:
        """Return the exchange to answer, the body to decode, and the explanation of the choice.

        If it is `client` itself, that was answered, with `id_headers` beside the router's.

        If the chosen model fails before its first token, `ask_again` is called once with the same for the next model.
        A body of another form (KServe's tensors), of which `read_texts` returns model and prompt, is guarded and keeps
        its model.
        Raises InvalidRequest for a body that is not JSON, Forbidden for one that a guard refuses, NoWorkers.
        """
        headers = client.request.headers
        api = _APIS.get(endpoint, "other")
        tenant = service.tenant_of(headers)
        request_body = original = client.request.body
        if read_texts is not None:
            original = await exchange.decode_apart(request_body, read_texts)
        barred = self._barred_models(client)
        if api == "chat":
            await self._service.recall(original, headers, tenant)
        classifiers = await self._service.ask_encoders(original, api)

        def route(body: bytes) -> routing_outcome.RoutedRequest:
            return self._service.route(body, headers, tenant, None, classifiers, barred, api)

        outcome = await self._route_or_wait(client, original, route, barred)
        if outcome.answer is None:
            first = outcome  # of a large body no copy is kept for a second model
            name = first.explanation.requested_model
            if read_texts is not None and name in self._service.router.settings.auto_names:
                expected = "which is not made for such requests; name a model"
                raise errors.InvalidRequest.of_param("model", f"{name!r} is a choice, {expected}")

            def ask_next(status: int) -> bool:
                reason = f"failed before its first token, with status {status}"
                failed = {first.explanation.model: reason}
                try:
                    second = self._service.route(
                        original, headers, tenant, failed, classifiers, barred, api
                    )
                except errors.DynamoError:
                    return False
                if second.answer is None:
                    routed = RoutedExchange(client, second, self._service)
                    ask_again(routed, second.body, functools.partial(_explain, second))
                return second.answer is None

            is_small = len(original) <= exchange.SMALL_BODY_BYTES
            has_next = outcome.is_chosen and is_small and read_texts is None
            next_model = ask_next if has_next else None
            routed = RoutedExchange(client, outcome, self._service, next_model)
            body = outcome.body if read_texts is None else request_body
            return routed, body, functools.partial(_explain, outcome)
        if endpoint != _CHAT:
            guard = outcome.explanation.verdicts[-1]
            raise errors.Forbidden(
                f"the request was refused by the {guard.guard} guard ({', '.join(guard.labels)}); "
                "rephrase it and ask again"
            )
        answer = outcome.answer
        client.respond(
            answer.status,
            answer.body,
            content_type=answer.content_type,
            headers=(*id_headers, *outcome.answer_headers()),
        )
        return client, outcome.body, functools.partial(_explain, outcome)

    async def _route_or_wait(
        self,
        client: exchange.Exchange,
        read_body: bytes,
        route: Callable[[bytes], routing_outcome.RoutedRequest],
        barred: Container[str],
    ) -> routing_outcome.RoutedRequest:
        """Return the outcome of a request; while no model has a worker, the default one is waited for as if named."""
        name = self.default_of(self.listed_name)

        async def find() -> None:
            self._models.find(name)

        try:
            if read_body is client.request.body:
                return await client.decode_body(route, service.ROUTED_AT_ONCE_BYTES)
            return await exchange.decode_apart(read_body, route, service.ROUTED_AT_ONCE_BYTES)
        except errors.NoWorkers:
            if name in barred:
                raise
        with contextlib.suppress(errors.DynamoError):
            announced_name = self._models.announced_name(name)
            wait = self._worker_wait.until_served
            await wait(find, announced_name, is_over=lambda: client.is_closed)
        return await exchange.decode_apart(read_body, route, service.ROUTED_AT_ONCE_BYTES)

    def _barred_models(self, client: exchange.Exchange) -> dict[str, str]:
        """Return the models that the client's key may not ask."""
        if not self._rights.uses_keys:
            return {}
        may_see, names = self._rights.may_see, self._service.router.model_names
        return {name: "not allowed to this key" for name in names if not may_see(client, name)}


def _explain(outcome: routing_outcome.RoutedRequest) -> explanation.RoutingExplanation:
    """Explain the choice of a model. Models that were left out are not named: not every key may know of them."""
    found = outcome.explanation
    policy = found.decision or "default_model"
    reason = "; ".join(filter(None, (*found.reasons, found.conversation))) or "no decision applies"
    if not outcome.is_chosen:
        policy, reason = "requested model", "the request names its model"
    return explanation.RoutingExplanation(
        kind="model", policy=policy, outcome=found.model, reason=reason
    )


class RoutedExchange(exchange.WrappedExchange):
    """Passes everything on to another exchange, adds the router's headers, and keeps the answer for the cache."""

    __slots__ = ("_ask_next", "_has_begun", "_outcome", "_recorder", "_service")

    def __init__(
        self,
        inner: exchange.Exchange,
        outcome: routing_outcome.RoutedRequest,
        routing: service.RoutingService,
        ask_next: Callable[[int], bool] | None = None,
    ) -> None:
        """`ask_next` gets the status of a failure, and returns whether another model answers in its place."""
        super().__init__(inner)
        self._ask_next = ask_next
        self._outcome = outcome
        self._service = routing
        self._recorder: cache.StreamRecorder | None = None
        self._has_begun = False

    def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: exchange.Headers = (),
    ) -> None:
        if status >= 400:
            self._service.record_failure(self._outcome, status)
        ask_next, self._ask_next = self._ask_next, None
        if status >= 500 and ask_next is not None and not self.is_closed and ask_next(status):
            return
        if status == 200:
            self._service.record_answer(self._outcome, body)
            self._service.record_first_piece(self._outcome, body)
        all_headers = (*headers, *self._outcome.explanation.headers())
        self._inner.respond(status, body, content_type=content_type, headers=all_headers)

    def start_stream(
        self, status: int, *, content_type: str, headers: exchange.Headers = ()
    ) -> None:
        if status == 200:
            keeps_text = self._outcome.cache_key is not None
            self._recorder = cache.make_recorder(content_type, keeps_text=keeps_text)
        all_headers = (*headers, *self._outcome.explanation.headers())
        self._inner.start_stream(status, content_type=content_type, headers=all_headers)

    def write(self, chunk: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._service.record_first_piece(self._outcome, chunk)
        if self._recorder is not None:
            self._recorder.feed(chunk)
        self._inner.write(chunk)

    def end(self, chunk: bytes = b"") -> None:
        if self._recorder is not None:
            self._recorder.feed(chunk)
        self._service.record_stream(self._outcome, self._recorder)
        self._inner.end(chunk)
