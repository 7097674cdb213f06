"""`POST /v1/embeddings`: the life of a request for vectors, as `pipeline` is that of a request for text.

It is a road of its own, because almost nothing is shared: no template, no sampling, no stream, no choices; several
inputs of one request may be computed by several workers.
"""

from collections.abc import Sequence

from dynamo.base import errors, ids
from dynamo.frontend import (
    apis,
    delivery,
    embedding_answer,
    embedding_shares,
    metrics,
    models,
    pipeline,
)
from dynamo.frontend.admission import desk
from dynamo.frontend.served_model import ServedModel
from dynamo.protocols import blocks, embed, openai_embeddings
from dynamo.runtime import client
from dynamo.runtime.http import exchange

ENDPOINT = "embeddings"  # the label in metrics


class Embeddings:
    """Answers requests for embeddings."""

    def __init__(
        self,
        known: models.Models,
        counted: metrics.FrontendMetrics,
        mode: client.Mode,
        timeout_s: float | None,
    ) -> None:
        self._models = known
        self._metrics = counted
        self._mode = mode
        self._timeout_s = timeout_s
        self._admission: desk.Desk | None = None  # None: everybody comes in

    def admit_by(self, admission: desk.Desk) -> None:
        """From now on a request goes past this desk before it goes to a worker."""
        self._admission = admission

    async def answer(self, caller: exchange.Exchange) -> None:
        """One request, from its body to the workers that answer it."""
        request_id = ids.new_request_id()
        headers = pipeline.id_headers(caller, apis.REQUEST_ID_HEADERS, request_id)
        try:
            request = openai_embeddings.decode(caller.request.body)
            model = self._models.find(request.model)
        except errors.DynamoError as error:
            self._meter(metrics.UNKNOWN_MODEL).failed(error)
            delivery.respond_error(caller, error, headers=headers)
            return
        meter = self._meter(model.name)
        try:
            embedding_shares.check_dimensions(request.dimensions, model.embedding)
            asked = embed.Request(
                id=request_id,
                model=model.name,
                inputs=tuple(await model.preparer.embedding(request)),
                dimensions=request.dimensions,
            )
            if self._admission is not None:
                await self._admission.admit(model, [asked], caller, meter, None)
        except errors.DynamoError as error:
            meter.failed(error)
            delivery.respond_error(caller, error, headers=headers)
            return
        order = _order(request, model, asked, headers)
        meter.prompt(order.num_tokens)
        reply = embedding_answer.EmbeddingAnswer(caller, order, meter)
        await self._dispatch(model, asked, reply)

    async def _dispatch(
        self,
        model: ServedModel,
        request: embed.Request,
        answer: embedding_answer.EmbeddingAnswer,
    ) -> None:
        """Each share to a worker."""
        lengths = list(map(blocks.count, request.inputs))
        for numbers in embedding_shares.deal(lengths, len(model.instances)):
            if answer.is_over:  # the client has gone, or an earlier share has failed
                return
            try:
                stream = await model.open(
                    _share(request, numbers),
                    embedding_answer.ShareReceiver(answer, numbers),
                    mode=self._mode,
                    instance_id=None,
                    headers=dict(answer.order.headers),
                    timeout_s=self._timeout_s,
                )
            except errors.DynamoError as error:
                answer.fail(error)
                return
            answer.opened(stream)

    def _meter(self, model: str) -> metrics.RequestMeter:
        return metrics.RequestMeter(self._metrics.of_model(model), ENDPOINT, is_stream=False)


def _order(
    request: openai_embeddings.EmbeddingRequest,
    model: ServedModel,
    asked: embed.Request,
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


def _share(request: embed.Request, numbers: Sequence[int]) -> embed.Request:
    return embed.Request(
        id=request.id,
        model=request.model,
        inputs=tuple(request.inputs[number] for number in numbers),
        dimensions=request.dimensions,
    )
