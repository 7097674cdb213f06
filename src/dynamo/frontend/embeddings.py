"""`POST /v1/embeddings`: the life of a request for vectors, as `pipeline` is that of a request for text.

It is a road of its own, because almost nothing is shared: no template, no sampling, no stream, no choices; several
inputs of one request may be computed by several workers.
"""

from collections.abc import Sequence

from dynamo.base import errors
from dynamo.frontend import apis, embedding_shares, metrics, pipeline
from dynamo.frontend.admission import controller
from dynamo.frontend.answer import delivery, embedding_answer
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import tracing
from dynamo.protocols import blocks, embed, openai_embeddings
from dynamo.router import route
from dynamo.runtime.http import exchange

ENDPOINT = "embeddings"  # the label in metrics


class Embeddings:
    """Answers requests for embeddings."""

    def __init__(
        self,
        known: registry.ModelRegistry,
        counted: metrics.FrontendMetrics,
        timeout_s: float | None,
        admission: controller.AdmissionController,
        enter_trace: tracing.StartSpan = tracing.forward_trace,
    ) -> None:
        self._models = known
        self._metrics = counted
        self._timeout_s = timeout_s
        self._enter_trace = enter_trace
        self._admission = admission

    async def answer(self, caller: exchange.Exchange) -> None:
        """One request, from its body to the workers that answer it."""
        arrival = pipeline.arrive(caller, self._metrics, self._enter_trace)
        headers = tuple((name, arrival.told_id) for name in apis.REQUEST_ID_HEADERS)
        try:
            request = openai_embeddings.decode(caller.request.body)
            model = self._models.find(request.model)
        except errors.DynamoError as error:
            self._meter(metrics.UNKNOWN_MODEL, arrival).failed(error)
            delivery.respond_error(caller, error, headers=headers)
            return
        meter = self._meter(model.name, arrival)
        try:
            asked = await self._prepare(model, request, arrival)
            if self._admission.is_active:
                await self._admission.admit(model, [asked], caller, meter, None)
        except errors.DynamoError as error:
            meter.failed(error)
            delivery.respond_error(caller, error, headers=headers)
            return
        meter.prompt(asked)
        order = _order(request, model, asked, headers)
        reply = embedding_answer.EmbeddingAnswer(caller, order, meter)
        await self._dispatch(model, asked, reply, arrival)
        meter.opened()

    async def _prepare(
        self,
        model: RegisteredModel,
        request: openai_embeddings.EmbeddingRequest,
        arrival: metrics.Arrival,
    ) -> embed.EmbeddingRequest:
        """Texts to tokens. Raises RequestError."""
        embedding_shares.check_dimensions(request.dimensions, model.embedding)
        return embed.EmbeddingRequest(
            id=arrival.id,
            model=model.name,
            inputs=tuple(await model.preparer.embedding(request)),
            dimensions=request.dimensions,
        )

    async def _dispatch(
        self,
        model: RegisteredModel,
        request: embed.EmbeddingRequest,
        answer: embedding_answer.EmbeddingAnswer,
        arrival: metrics.Arrival,
    ) -> None:
        """Each share to a worker."""
        headers = dict(answer.order.headers)
        if arrival.trace is not None:
            headers |= arrival.trace.headers()
        lengths = list(map(blocks.count, request.inputs))
        for numbers in embedding_shares.deal(lengths, len(model.instances)):
            if answer.is_over:  # the client has gone, or an earlier share has failed
                return
            try:
                stream = await model.open_stream(
                    _share(request, numbers),
                    embedding_answer.ShareReceiver(answer, numbers),
                    route.RoutingOptions(headers=headers, timeout_s=self._timeout_s),
                )
            except errors.DynamoError as error:
                answer.fail(error)
                return
            answer.opened(stream)

    def _meter(self, model: str, arrival: metrics.Arrival) -> metrics.RequestMeter:
        return metrics.RequestMeter(
            self._metrics.of_model(model), ENDPOINT, is_stream=False, arrival=arrival
        )


def _order(
    request: openai_embeddings.EmbeddingRequest,
    model: RegisteredModel,
    asked: embed.EmbeddingRequest,
    headers: exchange.Headers,
) -> embedding_answer.EmbeddingOrder:
    return embedding_answer.EmbeddingOrder(
        model=model.name,
        num_inputs=len(asked.inputs),
        num_tokens=asked.prompt_len,
        dimensions=request.dimensions or model.embedding.dimensions,
        is_base64=request.encoding_format == "base64",
        headers=headers,
    )


def _share(request: embed.EmbeddingRequest, numbers: Sequence[int]) -> embed.EmbeddingRequest:
    return embed.EmbeddingRequest(
        id=request.id,
        model=request.model,
        inputs=tuple(request.inputs[number] for number in numbers),
        dimensions=request.dimensions,
    )
