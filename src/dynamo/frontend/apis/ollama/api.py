"""Ollama's API, for its clients: text, embeddings, and which models are served.

A worker has its model loaded before it is served, so `/api/ps` lists the same models as `/api/tags`, which has models
on demand besides; and models are not pulled, copied or deleted here.

An answer is one object, or a line of JSON (NDJSON) for each part, of which the last tells the counts. Tool calls come
complete, as Ollama sends them, and are collected until another kind of piece follows.
"""

import functools
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import embeddings, error_dialects, models, openapi
from dynamo.frontend.apis.ollama import request
from dynamo.frontend.apis.ollama import request as ollama_request
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    GENERATION_ERRORS,
    HELLO,
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.delivery import choices, delivery, sse, streaming
from dynamo.preprocess import conversation
from dynamo.preprocess.parsers import parser
from dynamo.protocols import instances
from dynamo.runtime.http import exchange

NS_PER_S = 10**9
_REASONS = {"length": "length"}  # all others are "stop"


class OllamaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The message of the model, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """An answer or a line of one; durations are in nanoseconds, and the last line alone has them."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/chat`."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The answer of `/api/generate`."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class OllamaFormatter:
    """Formats the answer to one request."""

    def __init__(
        self, turn: ollama_request.OllamaConversation, answer_identity: sse.Identity
    ) -> None:
        self._turn = turn
        self._clock = answer_identity.clock
        self._began_at = self._clock.now()
        self._first_at = self._began_at  # of the first token, where it is known
        self._head = make_head(answer_identity.model, answer_identity.created)
        self._calls: list[choices.Call] = []

    def whole(self, answers: Sequence[sse.WholeChoice], usage: sse.Usage) -> dict[str, Any]:
        (answer,) = answers
        text = "".join(piece for piece in answer.pieces if isinstance(piece, str))
        thoughts = [piece.text for piece in answer.pieces if isinstance(piece, parser.Reasoning)]
        calls = [piece for piece in answer.pieces if isinstance(piece, choices.Call)]
        return self._object(
            text, "".join(thoughts), calls, self._ending(answer.finish_reason, usage)
        )

    def begin(self, usage: sse.Usage) -> bytes:
        """Note the time of the first token; the stream has nothing before it."""
        del usage
        self._first_at = self._clock.now()
        return b""

    def piece(self, piece: choices.Piece) -> bytes:
        """Return the line of a piece, after the calls that came before it."""
        if isinstance(piece, choices.Call):
            self._calls.append(piece)
            return b""
        if isinstance(piece, str):
            return self._take_calls() + sse.encode_line(self._object(piece))
        return self._take_calls() + sse.encode_line(self._object(thoughts=piece.text))

    def end(self, finish_reason: str, stop_string: str | None, usage: sse.Usage) -> bytes:
        """Return the last line, which has no text."""
        del stop_string
        last = self._object(ending=self._ending(finish_reason, usage))
        return self._take_calls() + sse.encode_line(last)

    def error(self, error: errors.DynamoError) -> bytes:
        """Return the last line of a failed stream."""
        return error_dialects.OLLAMA.body_of(error) + b"\n"

    def _take_calls(self) -> bytes:
        """Return the line of the calls that were collected, if there are any."""
        calls, self._calls = self._calls, []
        return sse.encode_line(self._object(calls=calls)) if calls else b""

    def _object(
        self,
        text: str = "",
        thoughts: str = "",
        calls: Sequence[choices.Call] = (),
        ending: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if thoughts and not self._turn.hides_thinking:
            shown["thinking"] = thoughts
        if calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {
                        "name": call.name,
                        "arguments": msgspec.Raw(call.arguments.encode()),
                    },
                }
                for call in calls
            ]
        content: dict[str, Any] = {"response": text, **shown}
        if self._turn.is_chat:
            content = {"message": {"role": "assistant", "content": text, **shown}}
        return {**self._head, **content, **(ending or {"done": False})}

    def _ending(self, finish_reason: str, usage: sse.Usage) -> dict[str, Any]:
        now = self._clock.now()
        return {
            "done": True,
            "done_reason": _REASONS.get(finish_reason, "stop"),
            "total_duration": round((now - self._began_at) * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((self._first_at - self._began_at) * NS_PER_S),
            "eval_count": usage.completion_tokens,
            "eval_duration": round((now - self._first_at) * NS_PER_S),
        }


def make_head(model: str, created: float) -> dict[str, Any]:
    """Return the fields that every answer begins with; `created` in seconds since 1970."""
    return {"model": model, "created_at": models.format_time(created)}


def make_load_answer(turn: ollama_request.OllamaConversation, created: float) -> dict[str, Any]:
    """Return the answer to a request that only asks for the model to be loaded, or to be unloaded."""
    content: dict[str, Any] = {"response": ""}
    if turn.is_chat:
        content = {"message": {"role": "assistant", "content": ""}}
    head = make_head(turn.model, created)
    reason = "load" if turn.keeps_alive else "unload"
    return {**head, **content, "done": True, "done_reason": reason}


_NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
# by our names of capabilities
_CAPABILITIES = {
    "chat": "completion",
    "tools": "tools",
    "reasoning": "thinking",
    "infill": "insert",
    "embeddings": "embedding",
    "images": "vision",
}
OLLAMA_RELEASE = "0.12.0"  # clients such as VS Code refuse servers before a release of Ollama's
_DIALECT = error_dialects.OLLAMA


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModelList(msgspec.Struct, kw_only=True):
    """The models that the client's API key allows."""

    models: list[OllamaModel]


class OllamaModelFacts(msgspec.Struct, kw_only=True):
    """What is known of a model."""

    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The release of Ollama whose API this is; `GET /version` has ours."""

    version: str


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The vectors of all texts; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """The vector of one text."""

    embedding: list[float]


class _Prompt(msgspec.Struct, frozen=True):
    """The fields of a request that say whether there is anything to answer."""

    prompt: str | None = None
    messages: list[Any] | None = None


_decode_prompt = msgspec.json.Decoder(_Prompt).decode


class OllamaHandlers:
    """The handlers of all routes."""

    def __init__(
        self,
        handlers: RequestHandlers,
        embedding_pipeline: embeddings.EmbeddingPipeline,
        list_on_demand: Callable[[], Collection[instances.WorkerStart]],
    ) -> None:
        self._handlers = handlers
        self._embeddings = embedding_pipeline
        self._list_on_demand = list_on_demand

    def generate(
        self, decode: Callable[[bytes], request.OllamaConversation], endpoint: str
    ) -> exchange.Handler:
        """Return the handler of a route that answers by text, or says that the model is loaded."""
        api = pipeline.GenerationApi(
            endpoint=endpoint,
            decode=decode,
            prepare=request.prepare,
            make_formatter=OllamaFormatter,
            stream=streaming.LineDelivery,
            dialect=_DIALECT,
        )
        answer_text = self._handlers.generate(api)
        confirm_loaded = add_request_id(
            self._handlers.accepted(functools.partial(self._confirm_loaded, decode), _DIALECT)
        )

        def handle(client: exchange.Exchange) -> Awaitable[None] | None:
            return (confirm_loaded if _is_empty(client) else answer_text)(client)

        return handle

    def embed(
        self,
        decode: Callable[[bytes], embeddings.VectorRequest],
        make_answer: Callable[[embeddings.EmbeddingPlan, Sequence[Any]], dict[str, Any]],
    ) -> exchange.Handler:
        """Return the handler of a route that answers with the vectors of texts."""
        api = embeddings.EmbeddingApi(
            decode=decode,
            make_vector=lambda _, vector: msgspec.Raw(sse.encode(vector)),
            make_answer=make_answer,
            dialect=_DIALECT,
        )
        return self._handlers.accepted(
            lambda client: self._embeddings.handle(client, api), _DIALECT
        )

    def list_models(self, client: exchange.Exchange, *, is_loaded: bool) -> None:
        """Answer with the models (`GET /api/tags`), with `is_loaded` as loaded ones (`GET /api/ps`)."""
        rows = []
        for model in self._handlers.list_visible(client):
            loaded = {
                "expires_at": _NEVER,
                "size_vram": 0,
                "context_length": model.card.context_length,
            }
            rows.append({**models.describe_for_ollama(model), **(loaded if is_loaded else {})})
        names = {row["name"] for row in rows}
        starts = () if is_loaded else self._list_on_demand()
        rows += [
            models.describe_unloaded_for_ollama(start)
            for start in starts
            if start.model not in names and self._handlers.rights.may_see(client, start.model)
        ]
        if not is_loaded:
            rows += models.list_name_of_choice(self._handlers, client, rows, "name", "model")
        client.respond(200, sse.encode({"models": rows}))

    async def show_model(self, client: exchange.Exchange) -> None:
        """Answer with the facts of a model (`POST /api/show`)."""
        capabilities: Sequence[str] = ()
        try:
            shown = await self._handlers.pipeline.unknown.decode(client, request.decode_model)
            name = self._handlers.default_of(client, shown.served_name)
            start = next((start for start in self._list_on_demand() if start.model == name), None)
            may_see = self._handlers.rights.model_filter(client)
            is_loaded = self._handlers.models.get(name) is not None
            if start is not None and not is_loaded and (may_see is None or may_see(start.model)):
                described = models.describe_unloaded_for_ollama(start)
                context_length = start.context_length
            else:
                model = self._handlers.models.find(name, may_see)
                described = models.describe_for_ollama(model)
                context_length = model.card.context_length
                capabilities = model.capabilities
        except errors.DynamoError as error:
            delivery.respond_error(client, error, _DIALECT)
            return
        basename = described["name"] if name == shown.served_name else shown.served_name
        facts = {
            "modified_at": described["modified_at"],
            "details": described["details"],
            "model_info": {
                "general.architecture": "dynamo",
                "general.basename": basename,
                "dynamo.context_length": context_length,
            },
            "capabilities": [_CAPABILITIES[name] for name in capabilities if name in _CAPABILITIES],
        }
        client.respond(200, sse.encode(facts))

    async def _confirm_loaded(
        self, decode: Callable[[bytes], request.OllamaConversation], client: exchange.Exchange
    ) -> None:
        """Answer as soon as a model is loaded; one on demand is loaded for that, unless it is to be unloaded."""
        answers = self._handlers.pipeline
        try:
            turn = await answers.unknown.decode(client, decode)
            name = self._handlers.default_of(client, turn.model)
            may_see = self._handlers.rights.model_filter(client)
            announced_name = self._handlers.models.announced_name(name)
            is_asleep = answers.worker_wait.is_expected(announced_name)
            if turn.keeps_alive or not is_asleep or not (may_see is None or may_see(name)):
                await answers.find_model(name, client)
        except errors.DynamoError as error:
            delivery.respond_error(client, error, _DIALECT)
        else:
            client.respond(200, sse.encode(make_load_answer(turn, answers.clock.wall())))

    def make_embeddings(
        self, plan: embeddings.EmbeddingPlan, vectors: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the answer with the vectors of all texts of a request."""
        duration_s = self._embeddings.seconds_since(plan.arrived_at)
        return {
            "model": plan.model,
            "embeddings": vectors,
            "total_duration": round(duration_s * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": plan.num_tokens,
        }


_MESSAGES = {
    "type": "array",
    "items": openapi.make_object(
        ("role",),
        role={"enum": list(conversation.ROLES)},
        content={"anyOf": [openapi.CONTENT, openapi.NULL]},
        **openapi.OTHER_KEYS,
    ),
}
_NAMED = {
    "anyOf": [
        openapi.make_object((name,), **{name: openapi.SOME_TEXT}) for name in ("model", "name")
    ]
}


def operations(
    request_handlers: RequestHandlers,
    embedding_pipeline: embeddings.EmbeddingPipeline,
    list_on_demand: Callable[[], Collection[instances.WorkerStart]],
) -> Sequence[Operation]:
    handlers = OllamaHandlers(request_handlers, embedding_pipeline, list_on_demand)
    api = Operations(tag="Ollama", dialect=_DIALECT, errors=ACCESS_ERRORS)
    api.post(
        "/api/chat",
        "Answer a conversation, as Ollama does",
        request=request.OllamaChatRequest,
        request_details={
            "messages": openapi.or_null(_MESSAGES),
            "tools": openapi.or_null(openapi.TOOLS),
        },
        answer=OllamaChatAnswer,
        streams_lines=True,
        errors=GENERATION_ERRORS,
        example={"messages": HELLO, "stream": False},
    )(handlers.generate(request.decode_chat, "ollama_chat"))
    api.post(
        "/api/generate",
        "Answer a prompt, as Ollama does",
        request=request.OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
        streams_lines=True,
        errors=GENERATION_ERRORS,
        example={"prompt": "What is the capital of France?", "stream": False},
    )(handlers.generate(request.decode_generate, "ollama_generate"))
    api.post(
        "/api/embed",
        "Vectors of texts, as Ollama gives them",
        request=request.OllamaEmbedRequest,
        request_details={"input": openapi.PROMPT_TEXTS},
        answer=OllamaEmbeddings,
        errors=GENERATION_ERRORS,
        example={"input": ["A cat sat on a mat."]},
    )(handlers.embed(request.decode_embed, handlers.make_embeddings))
    api.post(
        "/api/embeddings",
        "The vector of one text, as older clients of Ollama ask for it",
        request=request.OllamaEmbedPrompt,
        request_details={"prompt": openapi.SOME_TEXT},
        answer=OllamaEmbedding,
        errors=GENERATION_ERRORS,
        example={"prompt": "A cat sat on a mat."},
    )(handlers.embed(request.decode_embed_prompt, lambda _, vectors: {"embedding": vectors[0]}))
    for path, summary, is_loaded in (
        ("/api/tags", "The models that are served, as Ollama lists them", False),
        ("/api/ps", "Those of them that are loaded", True),
    ):
        list_models = functools.partial(handlers.list_models, is_loaded=is_loaded)
        api.get(path, summary, wrap=add_request_id, answer=OllamaModelList)(list_models)
    api.post(
        "/api/show",
        "What is known of a model, as Ollama shows it",
        wrap=add_request_id,
        request=request.OllamaModelRequest,
        request_rules=(_NAMED,),
        answer=OllamaModelFacts,
        errors=READ_ERRORS,
    )(request_handlers.accepted(handlers.show_model, _DIALECT))

    @api.get(
        "/api/version",
        "The release of Ollama whose API this is",
        wrap=add_request_id,
        answer=OllamaVersion,
    )
    def show_version(client: exchange.Exchange) -> None:
        client.respond(200, sse.encode({"version": OLLAMA_RELEASE}))

    return api.entries


def _is_empty(client: exchange.Exchange) -> bool:
    """Return whether a request has neither prompt nor messages; a malformed one is reported where it is decoded."""
    body = client.request.body
    if len(body) > exchange.SMALL_BODY_BYTES:
        return False
    try:
        prompt = _decode_prompt(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return not prompt.prompt and not prompt.messages
