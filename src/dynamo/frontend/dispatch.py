"""The way of an answer's prompts to workers, and of what is left of them when a worker is lost.

`Dispatcher.begin` is the first way. From then on the answer comes by callbacks; when a leg of it breaks off because its
worker is lost, `Trip.go_on` starts the one task that there is: it gives the rest to another instance, and waits a
little for one if there is none (a worker that was restarted is back in a second or two). The client sees a pause.

Whoever named an instance wants that one: its request is not moved.
"""

import logging
from collections.abc import Callable, Collection, Mapping

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.frontend import metrics, migration, nvext_response
from dynamo.frontend.delivery import delivery
from dynamo.frontend.delivery.attempt import Attempt
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import logs
from dynamo.protocols import blocks, generate
from dynamo.router import route
from dynamo.runtime import requests

PAUSE_S = 0.1  # until it is tried again to find a worker
_logger = logging.getLogger(__name__)


class Dispatcher:
    """What the trips of all requests share. `find` gives the model of this name as it is served now."""

    def __init__(
        self,
        find: Callable[[str], RegisteredModel],
        rules: migration.MigrationPolicy,
        clock: clocks.Clock,
        timeout_s: float | None,
        busy_workers: Callable[[RegisteredModel], Collection[int]],
    ) -> None:
        self.find = find
        self.rules = rules
        self.clock = clock
        self.timeout_s = timeout_s
        self.tasks = tasks.Tasks()
        self.busy_workers = busy_workers

    async def begin(
        self,
        model: RegisteredModel,
        reply: delivery.Delivery,
        meter: metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Each prompt to a worker."""
        trip = RequestDispatch(self, model, reply, meter, instance_id)
        reply.retry = trip.go_on
        avoid = self.busy_workers(model)
        for leg in reply.make_attempts():
            if reply.is_over:  # the client has gone, or an earlier prompt has failed
                return
            meter.prompt(leg.request)
            try:
                await trip.send(leg, model, avoid)
            except errors.DynamoError as error:
                reply.fail(error)
                return
        meter.opened()

    async def close(self) -> None:
        """Look for no more workers."""
        await self.tasks.close()


class RequestDispatch:
    """Of one request."""

    __slots__ = ("_instance_id", "_meter", "_model", "_reply", "_shared", "_until")

    def __init__(
        self,
        shared: Dispatcher,
        model: RegisteredModel,
        reply: delivery.Delivery,
        meter: metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        self._shared = shared
        self._model = model
        self._reply = reply
        self._meter = meter
        self._instance_id = instance_id
        limit_s = shared.timeout_s
        self._until = None if limit_s is None else shared.clock.now() + limit_s

    async def send(self, leg: Attempt, model: RegisteredModel, avoid: Collection[int]) -> None:
        """To an instance, if possible none of `avoid`. Raises what `ServedModel.open` does."""
        stream = await model.open_stream(
            leg.request,
            leg,
            route.RoutingOptions(
                instance_id=self._instance_id,
                headers=self._headers(),
                timeout_s=None if self._until is None else self._until - self._shared.clock.now(),
                add_disconnect_callback=self._reply.on_disconnect,
                on_dispatched=self._on_asked(leg),
                on_prefilled=None if self._extra is None else self._extra.prefilled,
            ),
            avoid=avoid,
        )
        self._opened(leg, stream)

    def go_on(self, leg: Attempt, error: errors.DynamoError) -> bool:
        """This leg broke off: another is begun for what is left of it; False: it cannot be."""
        if self._instance_id is not None or not self._is_lost(leg, error):
            return False
        rules, card = self._shared.rules, self._model.card
        origin, num_choices = self._reply.original_request(leg), self._reply.num_choices
        answered = leg.collect_answered(num_choices)
        verdict = rules.judge(
            num_migrations=leg.num_moves,
            limit=rules.limit_of(card.migration_limit),
            seq_len=origin.prompt_len + max(map(blocks.count, answered.values())),
        )
        if verdict is not migration.MigrationVerdict.MIGRATE:
            self._refuse(verdict, error)
            return False
        legs = self._reply.split(leg, migration.remaining_requests(origin, answered))
        self._shared.tasks.start("migrate a request", self._move(legs, error))
        return True

    def _is_lost(self, leg: Attempt, error: errors.DynamoError) -> bool:
        """Is that a reason to try elsewhere? A moved request need not fail because the next worker is full."""
        is_full = leg.num_moves > 0 and isinstance(error, errors.Unavailable)
        return is_full or isinstance(error, errors.WorkerLost)

    def _refuse(self, verdict: migration.MigrationVerdict, error: errors.DynamoError) -> None:
        token = logs.log_context.set(self._subject)
        if verdict is migration.MigrationVerdict.EXHAUSTED:
            _logger.warning("Migration limit exhausted (%s)", error)
        elif verdict is migration.MigrationVerdict.TOO_LONG:
            self._meter.was_too_long_to_move()
            _logger.warning("the request is longer than --migration-max-seq-len (%s)", error)
        logs.log_context.reset(token)

    async def _move(self, legs: Collection[Attempt], error: errors.DynamoError) -> None:
        logs.log_context.set(self._subject)
        _logger.warning("Stream disconnected... recreating stream... (%s)", error)
        began_at = self._shared.clock.now()
        if isinstance(error, errors.Unavailable):  # it was tried a moment ago
            await self._shared.clock.sleep(PAUSE_S)
        for leg in legs:
            if migration.has_no_tokens_left(leg.request):
                leg.receive(generate.Output((), generate.FinishReason.LENGTH))
            elif not self._reply.is_over:
                await self._place(leg, began_at)

    async def _place(self, leg: Attempt, began_at: float) -> None:
        """Find it a worker, or fail."""
        now, limit_s = self._shared.clock.now, self._shared.rules.wait_s
        while leg.is_open and not self._reply.is_over:
            try:
                model = self._current_model()
                await self.send(
                    leg, model, {*self._shared.busy_workers(model), *leg.lost_instances}
                )
            except (errors.Unavailable, errors.WorkerLost) as error:
                if now() - began_at >= limit_s:
                    self._reply.fail(error)
                    return
                await self._shared.clock.sleep(PAUSE_S)
            except errors.DynamoError as error:
                self._reply.fail(error)
            else:
                self._moved(leg, now() - began_at)
                return

    def _moved(self, leg: Attempt, duration_s: float) -> None:
        self._meter.moved(duration_s, is_new=not leg.has_begun)
        num_tokens = leg.request.num_resumed
        _logger.info("the stream goes on after %d tokens and %.1f ms", num_tokens, duration_s * 1e3)

    def _current_model(self) -> RegisteredModel:
        """The model may have vanished and come back. Raises NoWorkers."""
        model = self._shared.find(self._model.name)
        if model.card.checksums != self._model.card.checksums:
            raise errors.NoWorkers(
                f"the model {model.name!r} is another one by now, which cannot go on with this answer"
            )
        return model

    def _opened(self, leg: Attempt, stream: requests.Stream) -> None:
        leg.set_stream(stream)
        if self._reply.is_over or not leg.is_open:
            leg.cancel()

    @property
    def _extra(self) -> nvext_response.NvextResponse | None:
        return self._reply.prepared.extra

    def _on_asked(self, leg: Attempt) -> Callable[[int], None]:
        extra = self._extra
        if extra is None:
            return leg.set_instance

        def asked(instance_id: int) -> None:
            leg.set_instance(instance_id)
            extra.asked(instance_id)

        return asked

    def _headers(self) -> Mapping[str, str]:
        headers = dict(self._reply.prepared.headers)
        trace = self._meter.arrival.trace
        return headers if trace is None else headers | trace.headers()

    @property
    def _subject(self) -> logs.LogContext:
        arrival = self._meter.arrival
        return logs.LogContext("http-request", arrival.told_id, arrival.trace)
