"""The life of a request in the frontend: find its model, prepare it, give it to a worker, deliver what comes.

`Pipeline.answer` is that path. It returns when the workers have the request; from then on the answer goes from the
request plane's callbacks through a `Delivery` to the client, without any task.
"""

import logging
import re
from collections.abc import Sequence

from dynamo.base import clock, errors, ids
from dynamo.frontend import (
    apis,
    audit,
    dispatch,
    identity,
    metrics,
    nvext_response,
    routing_headers,
)
from dynamo.frontend.admission import controller
from dynamo.frontend.answer import delivery, instance_query, sse, whole_delivery
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import logs, tracing
from dynamo.protocols import generate, openai_fields
from dynamo.runtime.http import exchange

_CALLERS_ID = re.compile(r"[!-~]{1,200}")
_logger = logging.getLogger(__name__)


class Pipeline:
    """Answers requests that generate text."""

    def __init__(
        self,
        known: registry.ModelRegistry,
        counted: metrics.FrontendMetrics,
        time: clock.Clock,
        to_workers: dispatch.Dispatcher,
        admission: controller.AdmissionController,
        enter_trace: tracing.StartSpan = tracing.forward_trace,
        watch: audit.WatchExchange | None = None,
    ) -> None:
        self._models = known
        self._metrics = counted
        self._clock = time
        self._dispatcher = to_workers
        self._enter_trace = enter_trace
        self._watch = watch
        self._admission = admission

    async def answer(self, api: apis.Api[apis.R, apis.S], caller: exchange.Exchange) -> None:
        """One request, from its body to the workers that answer it."""
        arrival = arrive(caller, self._metrics, self._enter_trace)
        if self._watch is not None:
            caller = self._watch(caller)
        try:
            request = api.decode(caller.request.body)
            model = self._models.find(request.model)
        except errors.DynamoError as error:
            self._refuse(api, caller, arrival, error)
            return
        meter = metrics.RequestMeter(
            self._metrics.of_model(model.name),
            api.endpoint,
            is_stream=bool(request.stream),
            arrival=arrival,
        )
        try:
            routing = routing_headers.parse_headers(caller.request.headers)
            order = await self._prepare(api, model, request, arrival, routing)
            instance_id = routing.instance_of(request)
            if self._admission.is_active:
                prompts = [one.request for one in order.prompts]
                await self._admission.admit(model, prompts, caller, meter, instance_id)
            if instance_query.NAME in order.annotations:
                self._tell_instance(model, order, caller, instance_id)
                meter.succeeded()
                return
        except errors.DynamoError as error:
            meter.failed(error)
            delivery.respond_error(caller, error, api.dialect, _told(api, arrival))
            return
        deliver = api.stream if request.stream else whole_delivery.WholeDelivery
        reply = deliver(caller, order, meter)
        await self._dispatcher.begin(model, reply, meter, instance_id)

    async def _prepare(
        self,
        api: apis.Api[apis.R, apis.S],
        model: RegisteredModel,
        request: apis.R,
        arrival: metrics.Arrival,
        routing: routing_headers.RoutingHeaders,
    ) -> delivery.Order[apis.S]:
        """Text to tokens, and all that the answer will need."""
        model.check_can_generate()
        if request.store and self._watch is None:
            raise errors.InvalidRequest(
                "store: answers are not kept here; expected false or nothing, got true",
                param="store",
            )
        _check_logprobs(model, request)
        preparer = model.preparer
        wanted = request.extensions.extra_fields
        timed = (
            nvext_response.NvextResponse(wanted, self._clock) if wanted else None
        )  # from here on
        prompts = await api.prepare(preparer, request, arrival.id)
        _check_guided(model, prompts[0].request.sampling_options.guided_decoding)
        who = identity.Identity(
            request_id=arrival.id,
            created=int(self._clock.wall()),
            model=model.name,
            fingerprint=model.fingerprint,
            text=preparer.text,
        )
        return delivery.Order(
            shape=api.shape(request, who),
            dialect=api.dialect,
            preparer=preparer,
            prompts=routing.apply(prompts if timed is None else timed.apply(prompts)),
            request=request,
            headers=_told(api, arrival),
            extra=timed,
        )

    def _tell_instance(
        self,
        model: RegisteredModel,
        order: delivery.Order[sse.Shape],
        caller: exchange.Exchange,
        instance_id: int | None,
    ) -> None:
        """Who would be asked. Raises NoWorkers."""
        chosen = model.choose_instance(
            order.prompts[0].request,
            instance_id=instance_id,
            avoid=self._dispatcher.busy_workers(model),
        )
        instance_query.respond(caller, order, chosen)

    def _refuse(
        self,
        api: apis.Api[apis.R, apis.S],
        caller: exchange.Exchange,
        arrival: metrics.Arrival,
        error: errors.DynamoError,
    ) -> None:
        """Before it is known which model was meant."""
        unknown = self._metrics.of_model(metrics.UNKNOWN_MODEL)
        metrics.RequestMeter(unknown, api.endpoint, is_stream=False, arrival=arrival).failed(error)
        delivery.respond_error(caller, error, api.dialect, _told(api, arrival))


def arrive(
    caller: exchange.Exchange, counted: metrics.FrontendMetrics, enter_trace: tracing.StartSpan
) -> metrics.Arrival:
    """Note when it came and what it is called; all that is logged from here on says so."""
    at = counted.now()
    made = ids.new_request_id()
    told = callers_id(caller) or made
    trace, parent_id = enter_trace(caller.request.headers)
    logs.log_context.set(logs.LogContext("http-request", told, trace))
    return metrics.Arrival(at, made, told, trace, parent_id)


def callers_id(caller: exchange.Exchange) -> str | None:
    """The caller's own id for its request, if it has a sane one."""
    for name in apis.REQUEST_ID_HEADERS:
        given = caller.request.headers.get(name)
        if given is not None and _CALLERS_ID.fullmatch(given):
            return given
    return None


def id_headers(caller: exchange.Exchange, names: Sequence[str]) -> exchange.Headers:
    """What tells the caller its request's id; if it has none, we make one."""
    told = callers_id(caller) or ids.new_request_id()
    return tuple((name, told) for name in names)


def _told(api: apis.Api[apis.R, apis.S], arrival: metrics.Arrival) -> exchange.Headers:
    return [(name, arrival.told_id) for name in api.id_headers]


def _check_guided(model: RegisteredModel, asked: generate.GuidedDecoding | None) -> None:
    if asked is not None and not model.card.runtime_config.supports_guided:
        raise errors.InvalidRequest(
            f"{asked.param}: the engine of {model.name!r} cannot hold an answer to a grammar; leave it out",
            param=asked.param,
        )


def _check_logprobs(model: RegisteredModel, request: openai_fields.GenerationFields) -> None:
    """What its engine must be able to report. Raises InvalidRequest."""
    asked, facts = request.num_logprobs, model.card.runtime_config
    if request.is_chosen and not facts.supports_logprobs:
        raise errors.InvalidRequest(
            f"best_of: the engine of {model.name!r} does not report log probabilities to choose by; leave it out",
            param="best_of",
        )
    if asked is None:
        return
    if request.is_echoed and not facts.supports_prompt_logprobs:
        raise errors.InvalidRequest(
            f"logprobs: the engine of {model.name!r} does not report those of a prompt; leave out echo or logprobs",
            param="logprobs",
        )
    if not facts.supports_logprobs:
        raise errors.InvalidRequest(
            f"logprobs: the engine of {model.name!r} does not report them; leave it out",
            param="logprobs",
        )
    if asked > facts.max_top_logprobs:
        raise errors.InvalidRequest(
            f"top_logprobs: expected at most {facts.max_top_logprobs}, got {asked}",
            param="top_logprobs",
        )
