"""Ollama's API, for its clients: text, embeddings, and which models are served.

A worker has its model loaded before it is served, so `/api/ps` lists the same models as `/api/tags`, and models are not
pulled, copied or deleted here. Lines of a stream are JSON (NDJSON).
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import xxhash

from dynamo.base import distribution, errors
from dynamo.frontend import pipeline
from dynamo.frontend.apis import chat, embeddings, error_dialects, request_schemas
from dynamo.frontend.apis.ollama import answer, request
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    GENERATION_ERRORS,
    HELLO,
    READ_ERRORS,
    ApiContext,
    Operation,
    add_request_id,
)
from dynamo.frontend.delivery import delivery, sse, streaming
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.preprocess import conversation
from dynamo.runtime.http import exchange

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
    """The release of this server."""

    version: str


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """The vectors of all texts; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class _Prompt(msgspec.Struct, frozen=True):
    """The fields of a request that say whether there is anything to answer."""

    prompt: str | None = None
    messages: list[Any] | None = None


_decode_prompt = msgspec.json.Decoder(_Prompt).decode


class OllamaHandlers:
    """The handlers of all routes."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._embeddings = embeddings.EmbeddingPipeline(context)
        self._embedding_api = embeddings.EmbeddingApi(
            decode=request.decode_embed,
            make_vector=lambda _, vector: msgspec.Raw(sse.encode(vector)),
            make_answer=self._make_embeddings,
            dialect=_DIALECT,
        )

    def generate(
        self, decode: Callable[[bytes], request.OllamaConversation], endpoint: str
    ) -> exchange.Handler:
        """Return the handler of a route that answers by text, or says that the model is loaded."""
        api = pipeline.GenerationApi(
            endpoint=endpoint,
            decode=decode,
            prepare=chat.prepare,
            make_formatter=answer.OllamaFormatter,
            stream=streaming.LineDelivery,
            dialect=_DIALECT,
        )
        answer_text = self._context.generate(api)
        confirm_loaded = self._context.compute(decode, self._confirm_loaded, _DIALECT)

        def handle(client: exchange.Exchange) -> Awaitable[None] | None:
            return (confirm_loaded if _is_empty(client) else answer_text)(client)

        return handle

    def embed(self, client: exchange.Exchange) -> Awaitable[None] | None:
        """Answer with the vectors of texts (`POST /api/embed`)."""
        if not self._context.accept(client, _DIALECT):
            return None
        return self._embeddings.handle(client, self._embedding_api)

    def list_models(self, client: exchange.Exchange, *, is_loaded: bool) -> None:
        """Answer with the models (`GET /api/tags`), with `is_loaded` as loaded ones (`GET /api/ps`)."""
        rows = []
        for model in self._context.models.ready:
            if self._context.admission.may_see(client, model.name):
                loaded = {
                    "expires_at": _NEVER,
                    "size_vram": 0,
                    "context_length": model.card.context_length,
                }
                rows.append({**_describe(model), **(loaded if is_loaded else {})})
        client.respond(200, sse.encode({"models": rows}))

    async def show_model(self, client: exchange.Exchange) -> None:
        """Answer with the facts of a model (`POST /api/show`)."""
        if not self._context.accept(client, _DIALECT):
            return
        try:
            shown = await self._context.pipeline.unknown.decode(client, request.decode_model)
            model = self._context.models.find(shown.served_name)
            self._context.admission.check_may_see(client, model.name)
        except errors.DynamoError as error:
            delivery.respond_error(client, error, _DIALECT)
            return
        described = _describe(model)
        facts = {
            "modified_at": described["modified_at"],
            "details": described["details"],
            "model_info": {
                "general.architecture": "dynamo",
                "general.basename": described["name"],
                "dynamo.context_length": model.card.context_length,
            },
            "capabilities": [
                _CAPABILITIES[name] for name in model.capabilities if name in _CAPABILITIES
            ],
        }
        client.respond(200, sse.encode(facts))

    async def _confirm_loaded(self, turn: request.OllamaConversation) -> dict[str, Any]:
        created = self._context.models.find(turn.model).card.created
        return answer.make_load_answer(turn, created)

    def _make_embeddings(
        self, plan: embeddings.EmbeddingPlan, vectors: Sequence[Any]
    ) -> dict[str, Any]:
        duration_s = self._context.metrics.now() - plan.arrived_at
        return {
            "model": plan.model,
            "embeddings": vectors,
            "total_duration": round(duration_s * answer.NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": plan.num_tokens,
        }


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""
    handlers = OllamaHandlers(context)
    describe = functools.partial(Operation, tag="Ollama", dialect=_DIALECT)
    return (
        describe(
            method="POST",
            path="/api/chat",
            handler=handlers.generate(request.decode_chat, "ollama_chat"),
            summary="Answer a conversation, as Ollama does",
            request=request.OllamaChatRequest,
            request_details={
                "messages": request_schemas.or_null(_MESSAGES),
                "tools": request_schemas.or_null(request_schemas.TOOLS),
            },
            answer=answer.OllamaChatAnswer,
            streams_lines=True,
            errors=GENERATION_ERRORS,
            example={"messages": HELLO, "stream": False},
        ),
        describe(
            method="POST",
            path="/api/generate",
            handler=handlers.generate(request.decode_generate, "ollama_generate"),
            summary="Answer a prompt, as Ollama does",
            request=request.OllamaGenerateRequest,
            answer=answer.OllamaGenerateAnswer,
            streams_lines=True,
            errors=GENERATION_ERRORS,
            example={"prompt": "What is the capital of France?", "stream": False},
        ),
        describe(
            method="POST",
            path="/api/embed",
            handler=handlers.embed,
            summary="Vectors of texts, as Ollama gives them",
            request=request.OllamaEmbedRequest,
            request_details={"input": request_schemas.EMBEDDED_TEXTS},
            answer=OllamaEmbeddings,
            errors=GENERATION_ERRORS,
            example={"input": ["A cat sat on a mat."]},
        ),
        describe(
            method="GET",
            path="/api/tags",
            handler=add_request_id(functools.partial(handlers.list_models, is_loaded=False)),
            summary="The models that are served, as Ollama lists them",
            answer=OllamaModelList,
            errors=ACCESS_ERRORS,
        ),
        describe(
            method="GET",
            path="/api/ps",
            handler=add_request_id(functools.partial(handlers.list_models, is_loaded=True)),
            summary="The same: all that is served is loaded",
            answer=OllamaModelList,
            errors=ACCESS_ERRORS,
        ),
        describe(
            method="POST",
            path="/api/show",
            handler=add_request_id(handlers.show_model),
            summary="What is known of a model, as Ollama shows it",
            request=request.OllamaModelRequest,
            request_rules=(_NAMED,),
            answer=OllamaModelFacts,
            errors=READ_ERRORS,
        ),
        describe(
            method="GET",
            path="/api/version",
            handler=add_request_id(
                lambda client: client.respond(200, sse.encode({"version": distribution.version()}))
            ),
            summary="The release of this server",
            answer=OllamaVersion,
            errors=ACCESS_ERRORS,
        ),
    )


_MESSAGES = {
    "type": "array",
    "items": request_schemas.make_object(
        ("role",),
        role={"enum": list(conversation.ROLES)},
        content={"anyOf": [request_schemas.CONTENT, request_schemas.NULL]},
        **request_schemas.OTHER_KEYS,
    ),
}
_NAMED = {
    "anyOf": [
        request_schemas.make_object((name,), **{name: request_schemas.SOME_TEXT})
        for name in ("model", "name")
    ]
}


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


def _describe(model: RegisteredModel) -> dict[str, Any]:
    card = model.card
    checksums = "".join(sorted(card.checksums.values())) + card.weights
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": answer.format_time(card.created),
        "size": 0,
        "digest": xxhash.xxh3_128_hexdigest(checksums.encode()),
        "details": {
            "parent_model": "" if model.base is None else model.base.name,
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
