"""The life of a request in the frontend: find its model, prepare it, give it to a worker, deliver what comes.

`Pipeline.answer` is that path. It returns when the workers have the request; from then on the answer goes from the
request plane's callbacks through a `Delivery` to the client, without any task.
"""

import logging
import re
from collections.abc import Sequence

from dynamo.base import clock, errors, ids
from dynamo.frontend import apis, delivery, metrics, models, whole_delivery
from dynamo.frontend.served_model import ServedModel
from dynamo.runtime import client
from dynamo.runtime.http import exchange

_CALLERS_ID = re.compile(r"[!-~]{1,200}")
_logger = logging.getLogger(__name__)


class Pipeline:
    """Answers requests that generate text."""

    def __init__(
        self,
        known: models.Models,
        counted: metrics.FrontendMetrics,
        time: clock.Clock,
        mode: client.Mode,
        timeout_s: float | None,
    ) -> None:
        self._models = known
        self._metrics = counted
        self._clock = time
        self._mode = mode
        self._timeout_s = timeout_s

    async def answer(self, api: apis.Api[apis.R, apis.S], caller: exchange.Exchange) -> None:
        """One request, from its body to the workers that answer it."""
        try:
            request = api.decode(caller.request.body)
            model = self._models.find(request.model)
        except errors.DynamoError as error:
            self._refuse(api, caller, error)
            return
        meter = metrics.RequestMeter(
            self._metrics.of_model(model.name), api.endpoint, is_stream=bool(request.stream)
        )
        try:
            order = await self._prepare(api, model, request, caller)
        except errors.DynamoError as error:
            meter.failed(error)
            delivery.respond_error(caller, error, api.dialect, id_headers(caller, api.id_headers))
            return
        deliver = api.stream if request.stream else whole_delivery.WholeDelivery
        reply = deliver(caller, order, meter)
        await self._dispatch(model, reply, meter, request.extensions.backend_instance_id)

    async def _prepare(
        self,
        api: apis.Api[apis.R, apis.S],
        model: ServedModel,
        request: apis.R,
        caller: exchange.Exchange,
    ) -> delivery.Order[apis.S]:
        """Text to tokens, and all that the answer will need."""
        model.check_can_generate()
        _check_logprobs(model, api.num_logprobs(request))
        request_id = ids.new_request_id()
        preparer = model.preparer
        created = int(self._clock.wall())
        return delivery.Order(
            shape=api.shape(request, request_id, created, model.name, preparer.text),
            dialect=api.dialect,
            preparer=preparer,
            prompts=await api.prepare(preparer, request, request_id),
            headers=id_headers(caller, api.id_headers, request_id),
            echo=api.echo(request),
            include_usage=request.include_usage,
        )

    async def _dispatch(
        self,
        model: ServedModel,
        reply: delivery.Delivery,
        meter: metrics.RequestMeter,
        instance_id: int | None,
    ) -> None:
        """Each prompt to a worker."""
        for number, prompt in enumerate(reply.order.prompts):
            if reply.is_over:  # the client has gone, or an earlier prompt has failed
                return
            meter.prompt(prompt.request.prompt_len)
            try:
                stream = await model.open(
                    prompt.request,
                    reply.receiver(number),
                    mode=self._mode,
                    instance_id=instance_id,
                    headers=dict(reply.order.headers),
                    timeout_s=self._timeout_s,
                )
            except errors.DynamoError as error:
                reply.fail(error)
                return
            reply.opened(number, stream)

    def _refuse(
        self, api: apis.Api[apis.R, apis.S], caller: exchange.Exchange, error: errors.DynamoError
    ) -> None:
        """Before it is known which model was meant."""
        unknown = self._metrics.of_model(metrics.UNKNOWN_MODEL)
        metrics.RequestMeter(unknown, api.endpoint, is_stream=False).failed(error)
        delivery.respond_error(caller, error, api.dialect, id_headers(caller, api.id_headers))


def id_headers(
    caller: exchange.Exchange, names: Sequence[str], made: str | None = None
) -> exchange.Headers:
    """The caller's own id for its request, if it has a sane one; else the one that we made."""
    for name in apis.REQUEST_ID_HEADERS:
        given = caller.request.headers.get(name)
        if given is not None and _CALLERS_ID.fullmatch(given):
            made = given
            break
    made = made or ids.new_request_id()
    return tuple((name, made) for name in names)


def _check_logprobs(model: ServedModel, asked: int | None) -> None:
    if asked is None:
        return
    facts = model.card.runtime_config
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
