"""Dispatch of requests to workers, and of the rest of a request when its worker is lost.

`Dispatcher.dispatch_request` sends each prompt to a worker, and waits a while for one (`waiting`). From then on the
answer comes by callbacks. When an attempt ends early because its worker is lost, `RequestDispatch.retry` starts the
only task of a request: it sends the rest to another instance, and waits for one by the same rule (a restarted worker is
back in a second or two). The client sees a pause.

A request that names an instance is for that instance alone: it neither waits nor migrates.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.frontend import metrics, migration, waiting
from dynamo.frontend.delivery import delivery
from dynamo.frontend.delivery.attempt import Attempt
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import logs
from dynamo.protocols import blocks, generate
from dynamo.router import explanation, retry_rules, route

LOST_ANSWER = "an internal error lost the answer; see the log"
_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Dispatcher:
    """The parts that all requests share. `find_model` returns the model of a name as it is served now."""

    find_model: Callable[[str], RegisteredModel]
    policy: migration.MigrationPolicy
    clock: clocks.Clock
    timeout_s: float | None
    busy_workers: Callable[[RegisteredModel], Collection[int]]
    worker_wait: waiting.WorkerWait
    background: tasks.Tasks = field(default_factory=tasks.Tasks)

    async def dispatch_request(
        self,
        model: RegisteredModel,
        reply: delivery.Delivery,
        meter: metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Send each prompt of a request to a worker; an error goes to the delivery."""
        dispatch = RequestDispatch(self, model, reply, meter, instance_id)
        attempts = reply.make_attempts(dispatch.retry)
        meter.model.further_prompts.inc(len(attempts) - 1)
        for attempt in attempts:
            if reply.is_over:  # the client has disconnected, or an earlier prompt has failed
                return
            meter.record_prompt(attempt.request)
            try:
                await dispatch.find_worker(attempt)
            except errors.DynamoError as error:
                reply.fail(error)
                return
            except Exception:  # a fault of ours: nothing else would end the answer
                reply.fail(errors.DynamoError(LOST_ANSWER))
                raise
        meter.record_dispatched()

    async def close(self) -> None:
        """Cancel the search for workers of migrating requests."""
        await self.background.close()


class RequestDispatch:
    """The dispatch of one request."""

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
        self._dead_instances: frozenset[int] = frozenset()  # that died with a prompt of the request
        self._weights = ""  # the fingerprint of those with which the answer begins
        limit_s = shared.timeout_s
        self._deadline = None if limit_s is None else shared.clock.now() + limit_s

    async def find_worker(self, attempt: Attempt, *, is_under_way: bool = False) -> None:
        """Send an attempt to a worker as soon as there is one. Raises the error of the last try.

        A request for one instance does not wait.
        """
        if self._instance_id is not None:
            await self._send(attempt)
            return
        await self._shared.worker_wait.until_served(
            lambda: self._send(attempt),
            self._model.announced_name,
            is_over=lambda: self._reply.is_over or not attempt.is_open,
            is_under_way=is_under_way,
        )

    async def _send(self, attempt: Attempt) -> None:
        """Send an attempt to an instance, if possible to none that is busy or was lost with it.

        Raises as `RegisteredModel.open_stream`, or DeadlineExceeded if the request has waited for too long.
        """
        timeout_s = remaining_s(self._deadline, self._shared.clock.now(), self._shared.timeout_s)
        model = find_same_model(self._shared.find_model, self._model)
        had_begun = attempt.num_moves > 0 and attempt.has_begun
        headers = dict(self._reply.prepared.headers)
        trace = self._meter.arrival.trace
        attempt.stream = await model.open_stream(
            attempt.request,
            attempt,
            route.RoutingOptions(
                instance_id=self._instance_id,
                headers=headers if trace is None else headers | trace.headers(),
                timeout_s=timeout_s,
                add_disconnect_callback=self._reply.on_disconnect,
                on_dispatched=self._make_recorder(attempt),
                on_prefilled=self._meter.record_prefill,
                on_explained=None if self._meter.explanations is None else self._explain,
            ),
            avoid={*self._shared.busy_workers(model), *attempt.lost_instances},
            weights=self._weights if had_begun else "",
        )
        if attempt.instance_id is not None and not had_begun:
            self._weights = model.weights_of(attempt.instance_id)
        if self._reply.is_over or not attempt.is_open:
            attempt.cancel()

    def _make_recorder(self, attempt: Attempt) -> Callable[[int], None]:
        """Return what notes the instance that has taken an attempt, wherever that is shown."""

        def record(instance_id: int) -> None:
            attempt.instance_id = self._meter.worker_id = instance_id

        return record

    def _explain(self, explained: explanation.RoutingExplanation, hashes: Sequence[int]) -> None:
        if self._meter.explanations is not None:
            self._meter.explanations.append((explained, hashes))

    def retry(self, attempt: Attempt, error: errors.DynamoError) -> bool:
        """Start to migrate the rest of an attempt that ended early; return False if it must not migrate.

        A suspect is failed here, by an error that says so.
        """
        if self._instance_id is not None:
            return False
        policy, card_limit = self._shared.policy, self._model.card.migration_limit
        original, num_choices = self._reply.original_request(attempt), self._reply.num_choices
        answered = attempt.collect_answered(num_choices)
        has_begun, grammar = attempt.has_begun, original.sampling_options.guided_decoding
        loss = migration.Loss(
            error=error,
            num_migrations=attempt.num_moves,
            num_deaths=self._count_deaths(attempt, error),
            is_prepared=has_begun or grammar is None,
            has_others=not has_begun and self._model.has_others({attempt.instance_id}),
            seq_len=original.prompt_len + max(map(blocks.count, answered.values())),
        )
        verdict = policy.judge(loss, card_limit)
        if verdict is migration.MigrationVerdict.NOT_LOST:
            return False
        if verdict is migration.MigrationVerdict.SUSPECT:
            reported_id = self._meter.arrival.reported_id
            self._reply.fail(retry_rules.make_error(reported_id, loss.num_deaths))
            return True
        if self._meter.explanations is not None:
            event = "refused it" if isinstance(error, errors.Unavailable) else "was lost"
            cause = f"its worker {event} ({error.code})"
            if attempt.instance_id is not None:
                cause = f"instance {attempt.instance_id:x} {event} ({error.code})"
            explained = explanation.RoutingExplanation(
                kind="migration",
                policy=type(policy).__name__,
                outcome=verdict.name.lower(),
                reason=f"{cause} after {sum(map(blocks.count, answered.values()))} tokens; "
                f"migrations before: {attempt.num_moves} (at most {policy.limit_of(card_limit)})",
            )
            self._explain(explained, ())
        if verdict is not migration.MigrationVerdict.MIGRATE:
            self._log_refusal(verdict, error)
            return False
        attempts = self._reply.split(attempt, migration.remaining_requests(original, answered))
        task = self._shared.background.start("migrate a request", self._migrate(attempts, error))
        task.add_done_callback(self._fail_if_it_died)
        return True

    def _fail_if_it_died(self, task: asyncio.Task[None]) -> None:
        """Fail the answer if the task that migrates it has died, because nothing else would end it."""
        if task.cancelled() or task.exception() is not None:
            self._reply.fail(errors.DynamoError(LOST_ANSWER))

    def _count_deaths(self, attempt: Attempt, error: errors.DynamoError) -> int:
        """Return how many workers died that had this attempt or one before it for the same choices."""
        had_it = attempt.lost_instances
        if attempt.instance_id is not None:
            had_it |= {attempt.instance_id}
            if isinstance(error, errors.WorkerDied):
                self._dead_instances |= {attempt.instance_id}
        return len(had_it & self._dead_instances)

    def _log_refusal(self, verdict: migration.MigrationVerdict, error: errors.DynamoError) -> None:
        token = logs.log_context.set(self._log_context)
        if verdict is migration.MigrationVerdict.EXHAUSTED:
            _logger.warning("Migration limit exhausted (%s)", error)
        elif verdict is migration.MigrationVerdict.TOO_LONG:
            self._meter.record_too_long()
            _logger.warning("the request is longer than --migration-max-seq-len (%s)", error)
        logs.log_context.reset(token)

    async def _migrate(self, attempts: Collection[Attempt], error: errors.DynamoError) -> None:
        logs.log_context.set(self._log_context)
        _logger.warning("Stream disconnected... recreating stream... (%s)", error)
        began_at = self._shared.clock.now()
        if isinstance(error, errors.Unavailable):  # the last try was a moment ago
            await self._shared.clock.sleep(waiting.PAUSE_S)
        for attempt in attempts:
            if migration.has_no_tokens_left(attempt.request):
                attempt.receive(generate.Output((), generate.FinishReason.LENGTH))
            elif not self._reply.is_over:
                await self._resume(attempt, began_at)

    async def _resume(self, attempt: Attempt, began_at: float) -> None:
        """Send the rest of an answer to a worker, or fail the answer."""
        try:
            await self.find_worker(attempt, is_under_way=True)
        except errors.DynamoError as error:
            self._reply.fail(error)
            return
        duration_s = self._shared.clock.now() - began_at
        self._meter.record_migration(duration_s, is_new=not attempt.has_begun)
        num_tokens, ms = attempt.request.num_resumed, duration_s * 1e3
        _logger.info("the stream goes on after %d tokens and %.1f ms", num_tokens, ms)

    @property
    def _log_context(self) -> logs.LogContext:
        arrival = self._meter.arrival
        return logs.LogContext("http-request", arrival.reported_id, arrival.trace)


def remaining_s(deadline: float | None, now: float, limit_s: float | None) -> float | None:
    """Return the seconds that are left of the time limit of a request; None without one. Raises DeadlineExceeded."""
    if deadline is None or limit_s is None:
        return None
    if now >= deadline:
        raise errors.DeadlineExceeded(f"no complete answer within {limit_s:g} s")
    return deadline - now


def find_same_model(
    find_model: Callable[[str], RegisteredModel], model: RegisteredModel
) -> RegisteredModel:
    """Return the model as it is served now; it may have vanished and returned. Raises NoWorkers."""
    found = find_model(model.name)
    if found is not model and found.card.checksums != model.card.checksums:
        raise errors.NoWorkers(
            f"the model {model.name!r} is another one by now, which cannot go on with this answer"
        )
    return found
