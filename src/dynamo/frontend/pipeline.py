"""The path of a request for generated text: find its model, prepare it, admit it, give it to workers.

`Pipeline.answer` is that path. It returns when the workers have the request; from then on outputs go from the request
plane's callbacks through a `Delivery` to the client, without any task.

Clients send parameters of other servers, and of later versions of an API. What a server does not know cannot be judged:
`UnknownParameters` leaves it out, names it in a header of the answer, counts it, and logs it once per name; or it is
refused.
"""

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynamo.base import clock as clocks
from dynamo.base import errors, ids
from dynamo.frontend import dispatch, metrics, nvext, request_records, waiting
from dynamo.frontend.admission import controller
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.observability import logs, tracing
from dynamo.observability import metrics as observed
from dynamo.preprocess import inputs, preprocessor
from dynamo.protocols import model_errors
from dynamo.router import explanation
from dynamo.runtime.http import exchange, json_body

IGNORED_HEADER = "x-dynamo-ignored-parameters"
MAX_IGNORED_SHOWN = 20  # names in a header
MAX_LOGGED_NAMES = 1000  # names that are remembered so that each is logged once
_MAX_NAME_CHARS = 100
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # in a header's list of names: blanks, commas, controls
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class UnknownParameters:
    """Decodes requests, and reports the parameters that they have and our types have not."""

    def __init__(self, registry: observed.Registry, *, refuses: bool) -> None:
        self._refuses = refuses
        self._num_ignored = registry.counter(
            "ignored_parameters_total", "Unknown parameters of requests, which had no effect"
        )
        self._logged: set[str] = set()

    async def decode(
        self, client: exchange.Exchange, decode: Callable[[bytes], T], body: bytes | None = None
    ) -> T:
        """Return the client's decoded body, or this one in its place. Raises InvalidRequest."""
        names: list[str] = []
        decode_noting = functools.partial(self._decode_noting, names, decode)
        if body is not None:
            decoded = await exchange.decode_apart(body, decode_noting)
        elif len(client.request.body) <= exchange.SMALL_BODY_BYTES:
            decoded = decode_noting(client.request.body)  # nearly always so
        else:
            decoded = await client.decode_body(decode_noting)
        if names:
            self.report(client, names)
        return decoded

    def decode_here(self, client: exchange.Exchange, decode: Callable[[bytes], T]) -> T:
        """Return the client's decoded body, for a caller in a thread of its own. Raises InvalidRequest."""
        names: list[str] = []
        decoded = self._decode_noting(names, decode, client.request.body)
        self.report(client, names)
        return decoded

    def _decode_noting(self, names: list[str], decode: Callable[[bytes], T], body: bytes) -> T:
        """Return the decoded body, and add the names that no type has."""
        token = json_body.ignored_names.set(None if self._refuses else names)
        try:
            return decode(body)
        finally:
            json_body.ignored_names.reset(token)

    def report(self, client: exchange.Exchange, names: Sequence[str]) -> None:
        """Report unknown parameters with these names, if any. Raises InvalidRequest where they are refused."""
        if not names:
            return
        shown = [
            _UNPRINTABLE.sub("?", name[:_MAX_NAME_CHARS]) for name in names[:MAX_IGNORED_SHOWN]
        ]
        if self._refuses:
            raise errors.InvalidRequest(f"Unsupported parameter(s): {shown[0]}", param=shown[0])
        listed = ", ".join(shown) + (", ..." if len(names) > MAX_IGNORED_SHOWN else "")
        client.headers = (*client.headers, (IGNORED_HEADER, listed))
        self._num_ignored.inc(len(names))
        if len(self._logged) < MAX_LOGGED_NAMES and not self._logged.issuperset(shown):
            self._logged.update(shown)
            path = client.request.path
            _logger.info("ignored parameters that %s does not know: %s", path, listed)


REQUEST_ID_HEADERS = ("x-request-id", "x-dynamo-request-id")
QUERY_INSTANCE_ID = "query_instance_id"  # the annotation that asks which worker would answer
_CLIENT_REQUEST_ID = re.compile(r"[!-~]{1,200}")
Notify = Callable[[waiting.WaitNotice], None]
R = TypeVar("R", bound=inputs.GenerationInput)
F = TypeVar("F", bound=sse.AnswerFormatter)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationApi(Generic[R, F]):
    """An API that generates text: how to decode a request, prepare it and format its answer."""

    endpoint: str  # the label in metrics
    decode: Callable[[bytes], R]
    prepare: Callable[
        [preprocessor.Preprocessor, R, str], Awaitable[Sequence[preprocessor.Prepared]]
    ]
    make_formatter: Callable[[R, sse.Identity], F]
    stream: Callable[
        [exchange.Exchange, delivery.PreparedRequest[F], metrics.RequestMeter], delivery.Delivery
    ]
    dialect: delivery.ErrorDialect
    id_headers: Sequence[str] = REQUEST_ID_HEADERS
    # Returns what the semantic router reads of a body that is not JSON with a model; such a body is never changed.
    read_texts: Callable[[bytes], bytes] | None = None


ExplainModel = Callable[[], explanation.RoutingExplanation]


class BodyRouter(Protocol):
    """Chooses the model of a request by what it says, changes its body, or answers it."""

    async def route(
        self,
        client: exchange.Exchange,
        endpoint: str,
        ask_again: Callable[[exchange.Exchange, bytes, ExplainModel], None],
        read_texts: Callable[[bytes], bytes] | None,
        id_headers: exchange.Headers,
    ) -> tuple[exchange.Exchange, bytes, ExplainModel]:
        """Return the exchange to answer, the body to decode, and the explanation of the choice.

        If it is `client` itself, the router has answered, with `id_headers`. Raises RequestError.

        `ask_again` takes the same for another model, if the first one fails. `read_texts` returns what is read of
        a body that has another form and is never changed.
        """
        ...

    @property
    def listed_name(self) -> str:
        """The name that asks for a choice, as lists of models show it."""
        ...

    def default_of(self, name: str) -> str:
        """Return the default model for a name that asks for a choice; any other name stays."""
        ...


class Pipeline:
    """Answers the requests of all APIs that generate text."""

    def __init__(  # noqa: PLR0913  # the parts of a frontend
        self,
        registry: registry.ModelRegistry,
        frontend_metrics: metrics.FrontendMetrics,
        clock: clocks.Clock,
        dispatcher: dispatch.Dispatcher,
        worker_wait: waiting.WorkerWait,
        admission: controller.AdmissionController,
        unknown: UnknownParameters,
        start_trace: tracing.StartSpan = tracing.forward_trace,
        watch: request_records.WatchExchange = lambda client: client,
        semantic: BodyRouter | None = None,
        wants_explanation: Callable[[], bool] = lambda: False,
    ) -> None:
        """`wants_explanation` is asked for each request whether the router's decision is to be explained."""
        self.models = registry
        self.metrics = frontend_metrics
        self.clock = clock
        self._dispatcher = dispatcher
        self.worker_wait = worker_wait
        self.admission = admission
        self.unknown = unknown
        self.start_trace = start_trace
        self.watch = watch
        self.semantic = semantic
        self._wants_explanation = wants_explanation

    async def answer(self, api: GenerationApi[R, F], client: exchange.Exchange) -> None:
        """Take one request from its body to the workers that answer it."""
        arrival = record_arrival(client, self.metrics, self.start_trace)
        client = self.watch(client)
        body = explain_model = None
        if self.semantic is not None:

            def ask_again(
                client: exchange.Exchange, body: bytes, explain_model: ExplainModel
            ) -> None:
                def fail(_: BaseException) -> None:  # nothing else would end the answer
                    if client.is_streaming:
                        client.end()
                    else:
                        error = errors.DynamoError(dispatch.LOST_ANSWER)
                        self._refuse(api, client, arrival, error)

                work = self._answer(api, client, arrival, body, explain_model)
                self._dispatcher.background.start("ask another model", work, on_death=fail)

            try:
                routed, body, explain_model = await self.semantic.route(
                    client, api.endpoint, ask_again, api.read_texts, _id_headers(api, arrival)
                )
            except errors.DynamoError as error:
                self._refuse(api, client, arrival, error)
                return
            if routed.is_closed:
                meter = self._make_meter_of_no_model(api, client, arrival)
                if routed is client:  # the router has answered; else the client is gone
                    meter.record_success()
                else:
                    meter.record_disconnect()
                return
            client = routed
        await self._answer(api, client, arrival, body, explain_model)

    async def _answer(
        self,
        api: GenerationApi[R, F],
        client: exchange.Exchange,
        arrival: metrics.Arrival,
        body: bytes | None,
        explain_model: ExplainModel | None,
    ) -> None:
        """Take one request from its body, or the one in its place, to the workers."""
        try:
            request = await self.unknown.decode(client, api.decode, body)
            notify: Notify = _ignore_notice
            if request.stream and api.stream is streaming.StreamDelivery:
                notify = functools.partial(_tell_wait, client, _id_headers(api, arrival))
            model = await self.find_model(request.model, client, notify)
        except errors.DynamoError as error:
            self._refuse(api, client, arrival, error)
            return
        meter = metrics.RequestMeter(
            self.metrics.for_model(model.name),
            api.endpoint,
            is_stream=bool(request.stream),
            arrival=arrival,
        )
        self.admission.name_key(client, meter)
        try:
            routing = nvext.parse_headers(client.request.headers)
            extra_fields = nvext.requested_fields(request, client.request.headers)
            is_explained = nvext.EXPLANATION in extra_fields
            rights, salt = self.admission.rights, None
            if rights.uses_keys:
                rights.check_rights(
                    client,
                    chooses_worker=is_explained or routing.chooses_worker(request),
                    sets_priority=request.scheduling_priority > 0  # anyone may wait for others
                    or getattr(request.extensions.cache_control, "pin", False),
                )
            if rights.uses_keys or request.cache_salt is not None:
                salt = rights.cache_salt(client, model, request.cache_salt)
            if is_explained or self._wants_explanation():
                meter.explanations = [] if explain_model is None else [(explain_model(), ())]
            prepared = await self._prepare(
                api, model, request, arrival, routing, salt, extra_fields
            )
            instance_id = routing.instance_of(request)
            if self.admission.is_active:
                prompts = [prompt.request for prompt in prepared.prompts]
                await self.admission.admit(model, prompts, client, meter, instance_id)
            if QUERY_INSTANCE_ID in prepared.annotations:
                self._respond_instance_id(model, prepared, client, instance_id)
                meter.record_success()
                return
            deliver = api.stream if request.stream else delivery.WholeDelivery
            reply = deliver(client, prepared, meter)
        except errors.DynamoError as error:
            meter.record_failure(error)
            delivery.respond_error(client, error, api.dialect, _id_headers(api, arrival))
            return
        except (
            BaseException
        ):  # a fault of ours: the server answers, and the request is no longer open
            meter.record_failure(errors.DynamoError(dispatch.LOST_ANSWER))
            raise
        await self._dispatcher.dispatch_request(model, reply, meter, instance_id)

    def _refuse(
        self,
        api: GenerationApi[R, F],
        client: exchange.Exchange,
        arrival: metrics.Arrival,
        error: errors.DynamoError,
    ) -> None:
        """Answer a request for no known model with an error."""
        meter = self._make_meter_of_no_model(api, client, arrival)
        if client.is_closed:  # it went away while it waited for its model
            meter.record_disconnect()
        meter.record_failure(error)
        delivery.respond_error(client, error, api.dialect, _id_headers(api, arrival))

    def _make_meter_of_no_model(
        self, api: GenerationApi[R, F], client: exchange.Exchange, arrival: metrics.Arrival
    ) -> metrics.RequestMeter:
        """Return the meter of a request that no model answers, with the label of unknown models."""
        unknown = self.metrics.for_model(metrics.UNKNOWN_MODEL)
        meter = metrics.RequestMeter(unknown, api.endpoint, is_stream=False, arrival=arrival)
        self.admission.name_key(client, meter)
        return meter

    async def find_model(
        self, name: str, client: exchange.Exchange, notify: Notify = lambda notice: None
    ) -> RegisteredModel:
        """Return the model of this name, as soon as a worker has registered it.

        Raises ModelNotFound, also at once for a model that the client's key may not ask, or NoWorkers.
        """
        may_see = self.admission.rights.model_filter(client)
        model = self.models.get(name)
        if model is not None and (may_see is None or may_see(model.name)):  # nearly always so
            return model
        if may_see is not None and not may_see(await self.models.resolve_alias(name)):
            return self.models.find(name, may_see)  # raises, unless it has come meanwhile
        announced_name = self.models.announced_name(name)

        async def find() -> RegisteredModel:
            try:
                return self.models.find(name, may_see)
            except (model_errors.ModelNotFound, errors.NoWorkers) as error:
                if failure := self.worker_wait.failure_of(announced_name):
                    raise errors.NoWorkers(f"{name!r} could not be loaded: {failure}") from None
                if isinstance(error, errors.NoWorkers):
                    raise
                if self.worker_wait.is_expected(announced_name):
                    raise errors.NoWorkers(
                        f"the first worker of {name!r} is starting: try again shortly"
                    ) from None
                if await self.models.find_announced(name) is not None:
                    raise errors.NoWorkers(
                        f"the model {name!r} is being loaded: try again shortly"
                    ) from None
                raise

        return await self.worker_wait.until_served(
            find, announced_name, is_over=lambda: client.is_closed, notify=notify
        )

    async def _prepare(
        self,
        api: GenerationApi[R, F],
        model: RegisteredModel,
        request: R,
        arrival: metrics.Arrival,
        routing: nvext.RoutingHeaders,
        cache_salt: str | None,
        extra_fields: Collection[str],
    ) -> delivery.PreparedRequest[F]:
        """Tokenize the request and gather what its answer needs. Raises RequestError."""
        model.check_can_generate()
        _check_logprobs(model, request)
        preparer = model.preparer
        extra = nvext.NvextResponse(extra_fields, self.clock) if extra_fields else None
        prompts = await api.prepare(preparer, request, arrival.id)
        guided = prompts[0].request.sampling_options.guided_decoding
        if guided is not None and not model.card.runtime_config.supports_guided:
            raise errors.InvalidRequest.of_param(
                guided.param,
                f"the engine of {model.name!r} cannot hold an answer to a grammar; leave it out",
            )
        answer_identity = sse.Identity(
            request_id=arrival.id,
            created=int(self.clock.wall()),
            model=model.name,
            fingerprint=model.fingerprint,
            text=preparer.text,
            sampling=prompts[0].request.sampling_options,
            context_length=preparer.context_length,
            clock=self.clock,
        )
        return delivery.PreparedRequest(
            formatter=api.make_formatter(request, answer_identity),
            dialect=api.dialect,
            preparer=preparer,
            prompts=routing.apply(prompts if extra is None else extra.apply(prompts), cache_salt),
            request=request,
            headers=_id_headers(api, arrival),
            extra=extra,
        )

    def _respond_instance_id(
        self,
        model: RegisteredModel,
        prepared: delivery.PreparedRequest[F],
        client: exchange.Exchange,
        instance_id: int | None,
    ) -> None:
        """Answer which worker would be chosen, without asking it. Raises NoWorkers.

        A gateway in front of this frontend asks so, and later sends the request itself, with the worker's id and the
        tokens. Both are annotations of a stream that holds nothing else.
        """
        self.metrics.queries.labels(model.name.lower()).inc(1)
        chosen_id = model.choose_instance(
            prepared.prompts[0].request,
            instance_id=instance_id,
            avoid=self.admission.busy_workers.of_model(model),
        )
        if not client.is_streaming:  # it is if the client was told that it waits
            headers = (("cache-control", "no-cache"), *prepared.headers)
            client.start_stream(200, content_type=sse.CONTENT_TYPE, headers=headers)
        events = sse.annotation("worker_instance_id", str(chosen_id))
        events += sse.annotation("token_data", prepared.annotation_value("token_ids"))
        client.end(events + sse.DONE)


def _ignore_notice(notice: waiting.WaitNotice) -> None:
    """Do nothing: a client without a stream is told nothing before its answer."""


def record_arrival(
    client: exchange.Exchange,
    frontend_metrics: metrics.FrontendMetrics,
    start_trace: tracing.StartSpan,
) -> metrics.Arrival:
    """Return the time of arrival and the ids of a request; log records from here on carry them."""
    at = frontend_metrics.now()
    request_id = ids.new_request_id()
    reported_id = client_request_id(client) or request_id
    trace, parent_id = start_trace(client.request.headers)
    logs.log_context.set(logs.LogContext("http-request", reported_id, trace))
    return metrics.Arrival(at, request_id, reported_id, trace, parent_id)


def client_request_id(client: exchange.Exchange) -> str | None:
    """Return the id that the client gave its request, if it is a printable one."""
    headers = client.request.headers
    for name in REQUEST_ID_HEADERS:
        if name in headers and _CLIENT_REQUEST_ID.fullmatch(headers[name]):
            return headers[name]
    return None


def _tell_wait(
    client: exchange.Exchange, id_headers: exchange.Headers, notice: waiting.WaitNotice
) -> None:
    """Begin the stream by a comment that says how long it is expected to take."""
    if client.is_closed:
        return
    if not client.is_streaming:
        headers = (("cache-control", "no-cache"), *id_headers)
        client.start_stream(200, content_type=sse.CONTENT_TYPE, headers=headers)
    client.write(
        b": %s is being loaded: about %d s, number %d in the queue\n\n"
        % (sse.encode(notice.model), round(notice.estimate_s), notice.position)
    )


def _id_headers(api: GenerationApi[R, F], arrival: metrics.Arrival) -> exchange.Headers:
    return [(name, arrival.reported_id) for name in api.id_headers]


def _check_logprobs(model: RegisteredModel, request: inputs.GenerationInput) -> None:
    """Raise InvalidRequest for log probabilities that the model's engine cannot report."""
    num_logprobs, facts = request.num_logprobs, model.card.runtime_config
    wrong = errors.InvalidRequest.of_param
    if request.is_best_of and not facts.supports_logprobs:
        raise wrong(
            "best_of",
            f"the engine of {model.name!r} does not report log probabilities to choose by; leave it out",
        )
    num_of_prompt = request.prompt_logprobs
    if num_of_prompt is not None and not (
        facts.supports_prompt_logprobs and num_of_prompt <= facts.max_top_logprobs
    ):
        most = facts.max_top_logprobs if facts.supports_prompt_logprobs else "none"
        raise wrong(
            "prompt_logprobs",
            f"the engine of {model.name!r} reports at most {most}, got {num_of_prompt}: "
            "ask for less, or leave it out",
        )
    if num_logprobs is None:
        return
    if request.is_echoed and not facts.supports_prompt_logprobs:
        raise wrong(
            "logprobs",
            f"the engine of {model.name!r} does not report those of a prompt; leave out echo or logprobs",
        )
    if not facts.supports_logprobs:
        raise wrong("logprobs", f"the engine of {model.name!r} does not report them; leave it out")
    if num_logprobs > facts.max_top_logprobs:
        name = "top_logprobs" if getattr(request, "top_logprobs", None) else "logprobs"
        raise wrong(name, f"expected at most {facts.max_top_logprobs}, got {num_logprobs}")
