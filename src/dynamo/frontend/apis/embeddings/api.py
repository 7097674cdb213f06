"""`POST /v1/embeddings`: requests, and their path to workers, as `pipeline` is that of generated text.

The path is separate, because almost nothing is shared: no template, no sampling, no stream, no choices; several inputs
of one request may be computed by several workers.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import metrics, pipeline
from dynamo.frontend.apis import openai_errors
from dynamo.frontend.apis.completions import request as completion_request
from dynamo.frontend.apis.embeddings import answer
from dynamo.frontend.apis.operation import GENERATION_ERRORS, ApiContext, Operation
from dynamo.frontend.delivery import delivery
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.preprocess import inputs, options
from dynamo.protocols import blocks, embed, model_card
from dynamo.router import route
from dynamo.runtime.http import exchange, json_body

ENDPOINT = "embeddings"  # the label in metrics
MAX_INPUTS = 2048  # OpenAI's limit
MAX_CHARS = 16 * options.MAX_EMBEDDING_TOKENS  # so that far too long a text is not tokenized
MIN_SHARE_TOKENS = 512  # fewer are not worth another worker


class TextEmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids to embed."""

    model: str
    input: str | list[str | inputs.UInt32 | list[inputs.UInt32]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    # refused, unless it asks for nothing
    nvext: None = None

    @property
    def prompts(self) -> list[inputs.Prompt]:
        """One or more inputs, each a text or token ids."""
        return completion_request.split_prompts(self.input)

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        if not isinstance(self.input, str):
            completion_request.check_one_kind(self.input, "input")
        if len(self.prompts) > MAX_INPUTS:
            raise _wrong_input(f"at most {MAX_INPUTS} inputs", str(len(self.prompts)))
        for number, text in enumerate(self.prompts):
            if not text:
                raise _wrong_input(
                    "at least one character or token in each", f"none in number {number}"
                )
        num_chars = sum(len(text) for text in self.prompts if isinstance(text, str))
        if num_chars > MAX_CHARS:
            raise _wrong_input(
                f"at most {MAX_CHARS} characters in all inputs together", str(num_chars)
            )


def _wrong_input(expected: str, got: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(f"input: expected {expected}, got {got}", param="input")


_decoder = json_body.RequestDecoder(TextEmbeddingRequest)


def decode(body: bytes) -> TextEmbeddingRequest:
    """Return the request in this JSON body. Raises InvalidRequest, which names the field."""
    request = _decoder.decode(body)
    request.check()
    return request


class EmbeddingPipeline:
    """Answers requests for embeddings."""

    def __init__(self, context: ApiContext) -> None:
        self._models = context.models
        self._metrics = context.metrics
        self._admission = context.admission
        self._timeout_s = context.request_timeout_s
        self._start_trace = context.start_trace

    async def handle(self, client: exchange.Exchange) -> None:
        """Take one request from its body to the workers that answer it."""
        arrival = pipeline.record_arrival(client, self._metrics, self._start_trace)
        headers = tuple((name, arrival.reported_id) for name in pipeline.REQUEST_ID_HEADERS)
        try:
            request = decode(client.request.body)
            model = self._models.find(request.model)
        except errors.DynamoError as error:
            self._meter(metrics.UNKNOWN_MODEL, arrival).record_failure(error)
            delivery.respond_error(client, error, openai_errors, headers)
            return
        meter = self._meter(model.name, arrival)
        try:
            check_dimensions(request.dimensions, model.embedding)
            engine_request = embed.EmbeddingRequest(
                id=arrival.id,
                model=model.name,
                inputs=tuple(await model.preparer.tokenize_embedding_inputs(request.prompts)),
                dimensions=request.dimensions,
            )
            if self._admission.is_active:
                await self._admission.admit(model, [engine_request], client, meter, None)
        except errors.DynamoError as error:
            meter.record_failure(error)
            delivery.respond_error(client, error, openai_errors, headers)
            return
        meter.record_prompt(engine_request)
        plan = answer.EmbeddingPlan(
            model=model.name,
            num_inputs=len(engine_request.inputs),
            num_tokens=engine_request.prompt_len,
            dimensions=request.dimensions or model.embedding.dimensions,
            is_base64=request.encoding_format == "base64",
            headers=headers,
        )
        reply = answer.EmbeddingDelivery(client, plan, meter)
        await self._dispatch(model, engine_request, reply, arrival)
        meter.record_dispatched()

    async def _dispatch(
        self,
        model: RegisteredModel,
        request: embed.EmbeddingRequest,
        reply: answer.EmbeddingDelivery,
        arrival: metrics.Arrival,
    ) -> None:
        """Send each share to a worker."""
        headers = dict(reply.plan.headers)
        if arrival.trace is not None:
            headers |= arrival.trace.headers()
        lengths = list(map(blocks.count, request.inputs))
        for numbers in split_inputs(lengths, len(model.instances)):
            if reply.is_over:  # the client disconnected, or an earlier share failed
                return
            share = embed.EmbeddingRequest(
                id=request.id,
                model=request.model,
                inputs=tuple(request.inputs[number] for number in numbers),
                dimensions=request.dimensions,
            )
            try:
                stream = await model.open_stream(
                    share,
                    answer.ShareReceiver(reply, numbers),
                    route.RoutingOptions(headers=headers, timeout_s=self._timeout_s),
                )
            except errors.DynamoError as error:
                reply.fail(error)
                return
            reply.add_stream(stream)

    def _meter(self, model: str, arrival: metrics.Arrival) -> metrics.RequestMeter:
        return metrics.RequestMeter(
            self._metrics.for_model(model), ENDPOINT, is_stream=False, arrival=arrival
        )


def split_inputs(lengths: Sequence[int], num_workers: int) -> list[list[int]]:
    """Return the numbers of the inputs in each share: at most one share per worker, with similar numbers of tokens.

    `lengths` are tokens per input. The longest inputs are dealt out first.
    """
    num_shares = max(1, min(num_workers, len(lengths), sum(lengths) // MIN_SHARE_TOKENS))
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [sorted(longest_first[first::num_shares]) for first in range(num_shares)]


def check_dimensions(dimensions: int | None, facts: model_card.EmbeddingFacts) -> None:
    """Raise InvalidRequest if the model makes no vectors of this length; None is its full length."""
    if dimensions in (None, facts.dimensions) or (
        facts.can_shorten and dimensions in (facts.lengths or range(1, facts.dimensions))
    ):
        return
    if not facts.can_shorten:
        expected = f"{facts.dimensions} or nothing, as this model's vectors cannot be shortened"
    elif facts.lengths:
        expected = f"one of {', '.join(map(str, facts.lengths))}"
    else:
        expected = f"from 1 to {facts.dimensions}"
    raise errors.InvalidRequest(
        f"dimensions: expected {expected}, got {dimensions}", param="dimensions"
    )


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    embeddings = EmbeddingPipeline(context)
    return (
        Operation(
            method="POST",
            path="/v1/embeddings",
            handler=lambda client: (
                embeddings.handle(client) if context.accept(client, openai_errors) else None
            ),
            summary="Vectors of texts",
            tag="OpenAI",
            request=TextEmbeddingRequest,
            answer=answer.EmbeddingList,
            errors=GENERATION_ERRORS,
            example={"input": ["A cat sat on a mat.", "Where was the cat?"]},
        ),
    )
