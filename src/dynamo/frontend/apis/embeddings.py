"""`POST /v1/embeddings`: requests, their path to workers, as `pipeline` is that of generated text, and answers.

The path is separate, because almost nothing is shared: no template, no sampling, no stream, no choices. The inputs of
a request are dealt out in *shares*, one for each worker; of one that is lost, another worker gets what is missing. What
a worker replies is encoded as it comes, a batch at a time, so that a large answer never delays the streams of other
requests for long. The answer ends exactly once: complete, failed, or abandoned by the client; whatever still runs at a
worker is then cancelled.
"""

import base64
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec

from dynamo.base import errors
from dynamo.frontend import dispatch, metrics, migration, pipeline, waiting
from dynamo.frontend.apis import completions, error_dialects, openapi
from dynamo.frontend.apis.operation import GENERATION_ERRORS, Operation, RequestHandlers
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.preprocess import inputs, options
from dynamo.protocols import blocks, encoders, generate
from dynamo.router import retry_rules, route
from dynamo.runtime import requests
from dynamo.runtime.http import exchange, json_body

_logger = logging.getLogger(__name__)
_decode_vectors = msgspec.msgpack.Decoder(encoders.Vectors).decode


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class VectorRequest(Protocol):
    """The part of a request that says which vectors its answer is made of."""

    @property
    def model(self) -> str:
        """The name of the model, as the client gave it."""

    @property
    def prompts(self) -> Sequence[inputs.Prompt]:
        """One or more inputs, each a text or token ids."""

    def place_of(self, number: int) -> tuple[str, int]:
        """Return the field that has the input of this number, and its number there."""

    @property
    def dimensions(self) -> int | None:
        """The length to which each vector is shortened; None: the model's own."""

    @property
    def encoding_format(self) -> Literal["float", "base64"] | None:
        """The form of each vector; None: numbers."""

    @property
    def truncate_prompt_tokens(self) -> Literal[-1] | None:
        """-1: of an input that is longer than the context, the beginning; None: such an input is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingApi:
    """An API of vectors, or of what is made from them: how to decode a request and to format its answer."""

    decode: Callable[[bytes], VectorRequest]
    make_vector: Callable[[int, list[float] | str], Any]  # from the number of its input
    make_answer: Callable[["EmbeddingPlan", Sequence[Any]], dict[str, Any]]
    dialect: delivery.ErrorDialect
    endpoint: str = "embeddings"  # the label in metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """The answer that a client asked for."""

    model: str
    num_inputs: int
    num_tokens: int
    dimensions: int  # of each vector
    request: VectorRequest
    request_id: str
    api: EmbeddingApi
    arrived_at: float  # of the metrics' clock
    headers: exchange.Headers = ()


class EmbeddingDelivery:
    """Gathers the vectors of one request and answers when all have come."""

    def __init__(
        self, client: exchange.Exchange, plan: EmbeddingPlan, meter: metrics.RequestMeter
    ) -> None:
        self._client = client
        self.plan = plan
        self.meter = meter
        self._objects: list[Any] = [None] * plan.num_inputs
        self._num_missing = plan.num_inputs
        self._streams: list[requests.Stream] = []
        self.weights = ""  # the fingerprint of those with which all vectors are made
        self.is_over = False  # complete, failed or abandoned
        client.on_disconnect(self._abandon)

    def add_stream(self, stream: requests.Stream) -> None:
        """Take the stream of a share, to cancel it when the answer is over."""
        self._streams.append(stream)
        if self.is_over:
            stream.cancel()

    def add_vectors(self, numbers: Sequence[int], data: bytes) -> None:
        """Take the vectors of these inputs, packed floats. Raises RemoteProtocolError for a wrong length or input."""
        size = self.plan.dimensions * encoders.FLOAT_BYTES
        if len(data) != len(numbers) * size:
            raise errors.RemoteProtocolError(
                f"expected {len(numbers)} vectors of {size} bytes from the worker, got {len(data)} bytes"
            )
        for place, number in enumerate(numbers):
            if self._objects[number] is not None:
                raise errors.RemoteProtocolError(f"the worker sent vector {number} twice")
            vector = data[place * size : (place + 1) * size]
            is_base64 = self.plan.request.encoding_format == "base64"
            value = base64.b64encode(vector).decode() if is_base64 else encoders.unpack(vector)
            self._objects[number] = self.plan.api.make_vector(number, value)
            self._num_missing -= 1
        if self._num_missing:
            return
        body = sse.encode(self.plan.api.make_answer(self.plan, self._objects))
        self._close()
        self.meter.record_success()
        self._client.respond(200, body, headers=self.plan.headers)

    def find_missing(self, numbers: Sequence[int]) -> list[int]:
        """Return those of these inputs that have no vector yet."""
        return [number for number in numbers if self._objects[number] is None]

    def fail(self, error: errors.DynamoError) -> None:
        """End the answer by an error, unless it is over."""
        if not self.is_over:
            self._close()
            self.meter.record_failure(error)
            delivery.respond_error(self._client, error, self.plan.api.dialect, self.plan.headers)

    def _abandon(self) -> None:
        self._close()
        self.meter.record_disconnect()

    def _close(self) -> None:
        self.is_over = True
        for stream in self._streams:
            stream.cancel()


class ShareReceiver:
    """The receiver of one share's streams: of its worker, and of others when that is lost.

    `numbers` are the places of its inputs in the whole request; `retry` asks another worker, or returns False.
    """

    def __init__(self, reply: EmbeddingDelivery, numbers: Sequence[int], retry: "Retry") -> None:
        self.reply, self.numbers, self._retry = reply, numbers, retry
        self.tried_instances: list[int] = []
        self.losses: list[errors.DynamoError] = []

    def receive(self, output: generate.Output) -> None:
        del output
        self.reply.fail(errors.RemoteProtocolError("expected vectors from the worker"))

    def replied(self, body: msgspec.Raw) -> None:
        if self.reply.is_over:
            return
        try:
            vectors = _decode_vectors(body)
            numbers = [self.numbers[number] for number in vectors.numbers]
            self.reply.add_vectors(numbers, vectors.data)
        except errors.RemoteProtocolError as error:
            self.reply.fail(error)
        except (msgspec.DecodeError, IndexError) as error:
            self.reply.fail(errors.RemoteProtocolError(f"expected vectors: {error}"))
        except Exception:  # a fault of ours: what has come is not asked for again
            self.reply.fail(errors.DynamoError(dispatch.LOST_ANSWER))
            raise

    def ended(self, error: errors.DynamoError | None) -> None:
        missing = self.reply.find_missing(self.numbers)
        if self.reply.is_over or not missing:
            return
        error = error or errors.StreamBroken("the worker ended before its answer did")
        self.numbers = missing
        self.losses.append(error)
        if not self._retry(self):
            self.reply.fail(error)


Retry = Callable[[ShareReceiver], bool]
SendShare = Callable[[ShareReceiver], Awaitable[None]]
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
    # refused, unless they ask for nothing; those of vLLM for what vectors are not here
    nvext: None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    use_activation: Literal[True] | None = None
    normalize: Literal[True] | None = None
    add_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: Literal[-1] | None = None

    @property
    def prompts(self) -> list[inputs.Prompt]:
        return completions.split_prompts(self.input)

    def place_of(self, number: int) -> tuple[str, int]:
        return "input", number

    def check(self) -> None:
        """Raise InvalidRequest for what the types allow and the API does not."""
        if not isinstance(self.input, str):
            completions.check_one_kind(self.input, "input")
        check_prompts(self.prompts, "input")


def check_prompts(prompts: Sequence[inputs.Prompt], param: str) -> None:
    """Raise InvalidRequest for too many inputs, an empty one, or far too much text."""
    if len(prompts) > MAX_INPUTS:
        raise wrong_input(param, f"at most {MAX_INPUTS} inputs", str(len(prompts)))
    for number, text in enumerate(prompts):
        if not text:
            expected = "at least one character or token in each"
            raise wrong_input(param, expected, f"none in number {number}")
    num_chars = sum(len(text) for text in prompts if isinstance(text, str))
    if num_chars > MAX_CHARS:
        expected = f"at most {MAX_CHARS} characters in all inputs together"
        raise wrong_input(param, expected, str(num_chars))


def wrong_input(param: str, expected: str, got: str) -> errors.InvalidRequest:
    """Return the error for a field with texts."""
    return errors.InvalidRequest.of_param(param, f"expected {expected}, got {got}")


def _make_list(plan: EmbeddingPlan, vectors: Sequence[Any]) -> dict[str, Any]:
    usage = EmbeddingUsage(prompt_tokens=plan.num_tokens, total_tokens=plan.num_tokens)
    return {"object": "list", "data": vectors, "model": plan.model, "usage": usage}


API = EmbeddingApi(
    decode=json_body.RequestDecoder(TextEmbeddingRequest).decode,
    make_vector=lambda number, vector: msgspec.Raw(
        sse.encode({"object": "embedding", "index": number, "embedding": vector})
    ),
    make_answer=_make_list,
    dialect=error_dialects.OPENAI,
)


class EmbeddingPipeline:
    """Answers requests for embeddings."""

    def __init__(self, requests: pipeline.Pipeline, dispatcher: dispatch.Dispatcher) -> None:
        self._pipeline, self._dispatcher = requests, dispatcher

    def seconds_since(self, arrived_at: float) -> float:
        """Return how long ago a request arrived."""
        return self._pipeline.metrics.now() - arrived_at

    async def handle(self, client: exchange.Exchange, api: EmbeddingApi = API) -> None:
        """Take one request from its body to the workers that answer it."""
        arrival = pipeline.record_arrival(
            client, self._pipeline.metrics, self._pipeline.start_trace
        )
        client = self._pipeline.watch(client)
        headers = tuple((name, arrival.reported_id) for name in pipeline.REQUEST_ID_HEADERS)
        try:
            request = await self._pipeline.unknown.decode(client, api.decode)
            model = await self._pipeline.find_model(request.model, client)
        except errors.DynamoError as error:
            meter = self._meter(metrics.UNKNOWN_MODEL, client, arrival, api)
            if client.is_closed:  # it went away while it waited for its model
                meter.record_disconnect()
            meter.record_failure(error)
            delivery.respond_error(client, error, api.dialect, headers)
            return
        meter = self._meter(model.name, client, arrival, api)
        try:
            options.check_dimensions(request.dimensions, model.embedding)
            tokens = await model.preparer.tokenize_embedding_inputs(
                request.prompts, request.place_of, cuts=request.truncate_prompt_tokens == -1
            )
            engine_request = encoders.EmbeddingRequest(
                id=arrival.id,
                model=model.name,
                inputs=tuple(tokens),
                dimensions=request.dimensions,
            )
            if self._pipeline.admission.is_active:
                await self._pipeline.admission.admit(model, [engine_request], client, meter, None)
        except errors.DynamoError as error:
            meter.record_failure(error)
            delivery.respond_error(client, error, api.dialect, headers)
            return
        except BaseException:  # ours, or a batch was cancelled: the request is no longer open
            meter.record_failure(errors.DynamoError(dispatch.LOST_ANSWER))
            raise
        meter.record_prompt(engine_request)
        plan = EmbeddingPlan(
            model=model.name,
            num_inputs=len(engine_request.inputs),
            num_tokens=engine_request.prompt_len,
            dimensions=request.dimensions or model.embedding.dimensions,
            request=request,
            request_id=arrival.reported_id,
            api=api,
            arrived_at=arrival.at,
            headers=headers,
        )
        reply = EmbeddingDelivery(client, plan, meter)
        await self._dispatch(model, engine_request, reply, arrival)
        meter.record_dispatched()

    async def _dispatch(
        self,
        model: RegisteredModel,
        request: encoders.EmbeddingRequest,
        reply: EmbeddingDelivery,
        arrival: metrics.Arrival,
    ) -> None:
        """Send each share to a worker."""
        headers = dict(reply.plan.headers)
        if arrival.trace is not None:
            headers |= arrival.trace.headers()
        limit_s = self._dispatcher.timeout_s
        deadline = None if limit_s is None else self._pipeline.clock.now() + limit_s
        open_stream = functools.partial(self._open_stream, model, request, headers, deadline)
        send = functools.partial(self._send_share, model.name, open_stream)
        for numbers in split_inputs([*map(blocks.count, request.inputs)], len(model.instances)):
            if reply.is_over:  # the client disconnected, or an earlier share failed
                return
            await send(ShareReceiver(reply, numbers, functools.partial(self._retry, model, send)))

    async def _send_share(
        self,
        model_name: str,
        open_stream: Callable[[ShareReceiver], Awaitable[requests.Stream]],
        share: ShareReceiver,
    ) -> None:
        """Send the inputs of a share to a worker as soon as there is one, or fail the answer."""
        try:
            stream = await self._pipeline.worker_wait.until_served(
                lambda: open_stream(share),
                model_name,
                is_over=lambda: share.reply.is_over,
                is_under_way=bool(share.losses),
            )
        except errors.DynamoError as error:
            share.reply.fail(error)
        except Exception:  # a fault of ours: nothing else would end the answer
            share.reply.fail(errors.DynamoError(dispatch.LOST_ANSWER))
            raise
        else:
            share.reply.add_stream(stream)

    async def _open_stream(
        self,
        model: RegisteredModel,
        request: encoders.EmbeddingRequest,
        headers: Mapping[str, str],
        deadline: float | None,
        share: ShareReceiver,
    ) -> requests.Stream:
        """Send a share to an instance of the model as it is served now, if possible to none that had it.

        Raises as `RegisteredModel.open_stream`, or DeadlineExceeded if the request has waited for too long.
        """
        reply, limit_s, now = share.reply, self._dispatcher.timeout_s, self._pipeline.clock.now()
        options = route.RoutingOptions(
            headers=headers,
            timeout_s=dispatch.remaining_s(deadline, now, limit_s),
            on_dispatched=share.tried_instances.append,
        )
        found = dispatch.find_same_model(self._pipeline.models.find, model)
        part = tuple(request.inputs[number] for number in share.numbers)
        part_request = msgspec.structs.replace(request, inputs=part)
        stream = await found.open_stream(
            part_request, share, options, avoid=share.tried_instances, weights=reply.weights
        )
        reply.weights = reply.weights or found.weights_of(share.tried_instances[-1])
        return stream

    def _retry(self, model: RegisteredModel, send: SendShare, share: ShareReceiver) -> bool:
        """Start to migrate a share; return False if it must not migrate. A suspect is failed here."""
        loss = migration.Loss(
            error=share.losses[-1],
            num_migrations=len(share.losses) - 1,
            num_deaths=sum(isinstance(each, errors.WorkerDied) for each in share.losses),
            is_prepared=True,
            has_others=model.has_others(share.tried_instances),
        )
        verdict = self._dispatcher.policy.judge(loss, model.card.migration_limit)
        if verdict is migration.MigrationVerdict.SUSPECT:
            share.reply.fail(retry_rules.make_error(share.reply.plan.request_id, loss.num_deaths))
            return True
        if verdict is not migration.MigrationVerdict.MIGRATE:
            return False
        self._dispatcher.background.start("migrate vectors", self._migrate(send, share))
        return True

    async def _migrate(self, send: SendShare, share: ShareReceiver) -> None:
        """Send what is missing of a share to another worker, or fail the answer."""
        error, reply, began_at = share.losses[-1], share.reply, self._pipeline.clock.now()
        _logger.warning("Stream disconnected... recreating stream... (%s)", error)
        is_new = len(share.numbers) == reply.plan.num_inputs
        if isinstance(error, errors.Unavailable):  # the last try was a moment ago
            await self._pipeline.clock.sleep(waiting.PAUSE_S)
        if not reply.is_over:
            await send(share)
            reply.meter.record_migration(self._pipeline.clock.now() - began_at, is_new=is_new)

    def _meter(
        self, model: str, client: exchange.Exchange, arrival: metrics.Arrival, api: EmbeddingApi
    ) -> metrics.RequestMeter:
        by_model = self._pipeline.metrics.for_model(model)
        meter = metrics.RequestMeter(by_model, api.endpoint, is_stream=False, arrival=arrival)
        self._pipeline.admission.name_key(client, meter)
        return meter


def split_inputs(lengths: Sequence[int], num_workers: int) -> list[list[int]]:
    """Return the numbers of the inputs in each share: at most one share per worker, with similar numbers of tokens.

    `lengths` are tokens per input. The longest inputs are dealt out first.
    """
    num_shares = max(1, min(num_workers, len(lengths), sum(lengths) // MIN_SHARE_TOKENS))
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [sorted(longest_first[first::num_shares]) for first in range(num_shares)]


def operations(handlers: RequestHandlers, embeddings: EmbeddingPipeline) -> Sequence[Operation]:
    return (
        Operation(
            method="POST",
            path="/v1/embeddings",
            handler=handlers.accepted(embeddings.handle),
            summary="Vectors of texts",
            tag="OpenAI",
            request=TextEmbeddingRequest,
            request_details={"input": openapi.PROMPTS},
            body_factor=4,  # the texts of a full batch, where each character is several bytes
            answer=EmbeddingList,
            errors=GENERATION_ERRORS,
            example={"input": ["A cat sat on a mat.", "Where was the cat?"]},
        ),
    )
