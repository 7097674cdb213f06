"""The classification API: what the classifiers and the router say of a text, over HTTP.

Texts are read by the same classifiers, over the same windows, as in routing. Paths, fields and errors are those of
the original.
"""

import datetime
import functools
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.gateway import administration, embedding_api
from dynamo.runtime.http import exchange
from dynamo.semantic import config, encoder_labels, guards, service
from dynamo.semantic.classifiers import profile

_SPECIALIZED = 0.7  # the confidence from which a specialised model is recommended


Task = Literal["intent", "pii", "security", "all"]
_CLASSIFIERS: dict[Task, tuple[str, ...]] = {
    "intent": (encoder_labels.DOMAIN,),
    "pii": (encoder_labels.PII,),
    "security": (encoder_labels.ATTACK,),
    "all": (encoder_labels.DOMAIN, encoder_labels.PII, encoder_labels.ATTACK),
}


class ClassifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a classification."""

    return_probabilities: bool = False
    confidence_threshold: float | None = None
    include_explanation: bool = False


class TextToClassify(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a classification of one text."""

    text: embedding_api.Text
    options: ClassifyOptions = ClassifyOptions()


class TextsToClassify(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a classification of several texts."""

    texts: list[Annotated[str, msgspec.Meta(max_length=embedding_api.MOST_TEXT)]]
    task_type: Task = "intent"
    options: ClassifyOptions = ClassifyOptions()


class EntriesToDelete(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a deletion of cached answers: of some, or of all that were given with the caller's API key."""

    keys: Annotated[list[str], msgspec.Meta(max_length=1000)] = []
    all: bool = False


_decode_text = msgspec.json.Decoder(TextToClassify).decode
_decode_texts = msgspec.json.Decoder(TextsToClassify).decode
_decode_entries = msgspec.json.Decoder(EntriesToDelete).decode
_BODIES: dict[str, type] = {
    **{f"/api/v1/classify/{task}": TextToClassify for task in ("intent", "pii", "security")},
    "/api/v1/classify/combined": TextToClassify,
    "/api/v1/classify/batch": TextsToClassify,
    "/api/v1/embeddings": embedding_api.TextsToEmbed,
    "/api/v1/similarity": embedding_api.TextPair,
    "/api/v1/similarity/batch": embedding_api.TextAndCandidates,
    "/api/v1/response-cache/invalidate": EntriesToDelete,
    "/config/classification": config.SemanticConfig,
    "/config/system-prompts": administration.SystemPromptChange,
}
_NAME = "classification-api"
_STATUSES: dict[type[errors.DynamoError], int] = {
    errors.InvalidRequest: 400,
    errors.ConfigError: 400,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.Unavailable: 503,
}


class ClassificationApi:
    """Answers the requests of the API."""

    def __init__(self, routing: service.RoutingService, clock: clocks.Clock) -> None:
        self._routing = routing
        self._clock = clock
        self._profile = profile.load_profile()

    async def ask_encoders(
        self, body: bytes, texts: Sequence[str], task: Task
    ) -> guards.RequestClassifiers:
        """Return the classifiers for the texts of a body: the shipped ones, and what the encoders answer."""
        router = self._routing.router
        if not router.loaded.uses_encoders:
            return self._profile
        texts_by_classifier = dict.fromkeys(_CLASSIFIERS[task], texts)
        inputs = await exchange.decode_apart(
            body,
            lambda _: router.list_inputs_for(texts_by_classifier),
            service.ROUTED_AT_ONCE_BYTES,
        )
        if encoder_labels.DOMAIN in _CLASSIFIERS[task]:  # the model is recommended, too
            inputs += router.list_embedding_inputs(texts)
        return await self._routing.ask_encoders_for(inputs)

    def classify_intent(
        self, text: str, options: ClassifyOptions, classifiers: guards.RequestClassifiers
    ) -> dict[str, Any]:
        """Return the domain of a text and the model that the router would choose for it."""
        start = self._clock.now()
        score = classifiers.classify_domain(text)
        threshold = options.confidence_threshold
        if threshold is None:
            threshold = _SPECIALIZED
        answer: dict[str, Any] = {
            "classification": {
                "category": score.category,
                "confidence": score.confidence,
                "processing_time_ms": self._elapsed_ms("category", start),
            },
            "recommended_model": self._recommend(text, classifiers),
            "routing_decision": "high_confidence_specialized"
            if score.confidence >= threshold
            else "low_confidence_general",
        }
        if options.return_probabilities:
            answer["probabilities"] = score.probabilities
        return answer

    def classify_pii(
        self, text: str, _: ClassifyOptions, classifiers: guards.RequestClassifiers
    ) -> dict[str, Any]:
        """Return the personal data in a text, without the data itself."""
        start = self._clock.now()
        all_spans, is_complete = classifiers.find_pii(text)
        threshold = self._routing.router.settings.classifier.pii_model.threshold
        spans = [span for span in all_spans if span.confidence >= threshold]
        entities = [
            {
                "type": span.type,
                "value": "[DETECTED]",
                "confidence": span.confidence,
                "start_position": span.start,
                "end_position": span.end,
            }
            for span in spans
        ]
        return {
            "has_pii": bool(spans),
            "entities": entities,
            "security_recommendation": "block" if spans else "allow",
            "is_complete": is_complete,
            "processing_time_ms": self._elapsed_ms("pii", start),
        }

    def classify_security(
        self, text: str, _: ClassifyOptions, classifiers: guards.RequestClassifiers
    ) -> dict[str, Any]:
        """Return the probability that a text attacks the model's instructions, and what speaks for it."""
        start = self._clock.now()
        score = classifiers.classify_attack(text)
        threshold = self._routing.router.settings.prompt_guard.threshold
        is_attack = score.risk >= threshold
        matched = ", ".join(score.rules) or "none"
        return {
            "is_jailbreak": is_attack,
            "risk_score": score.risk,
            "detection_types": ["jailbreak"] if is_attack else [],
            "confidence": max(score.risk, 1 - score.risk),
            "recommendation": "block" if is_attack else "allow",
            "reasoning": f"probability of an attack {score.risk:.3f}, threshold {threshold:g}; rules: {matched}",
            "patterns_detected": list(score.rules),
            "is_complete": score.is_complete,
            "processing_time_ms": self._elapsed_ms("jailbreak", start),
        }

    def classify_combined(
        self, text: str, options: ClassifyOptions, classifiers: guards.RequestClassifiers
    ) -> dict[str, Any]:
        """Return the results of all classifiers for a text."""
        return {
            "intent": self.classify_intent(text, options, classifiers),
            "pii": self.classify_pii(text, options, classifiers),
            "security": self.classify_security(text, options, classifiers),
        }

    async def answer_text(
        self, task: Task, classify: Callable[..., Any], client: exchange.Exchange
    ) -> dict[str, Any]:
        """Return the result of one of the methods above for the text in a body."""
        request = _decode_text(client.request.body)
        classifiers = await self.ask_encoders(client.request.body, [request.text], task)
        return await client.decode_body(
            lambda _: classify(request.text, request.options, classifiers),
            service.ROUTED_AT_ONCE_BYTES,
        )

    async def answer_batch(self, client: exchange.Exchange) -> dict[str, Any]:
        """Return the results for several texts in their order. Raises InvalidRequest for too many texts, or none."""
        request = _decode_texts(client.request.body)
        most = self._routing.router.settings.api.batch_classification.max_batch_size
        if not 0 < len(request.texts) <= most:
            raise errors.InvalidRequest.of_param(
                "texts", f"expected 1 to {most} texts, got {len(request.texts)}"
            )
        classifiers = await self.ask_encoders(client.request.body, request.texts, request.task_type)
        start = self._clock.now()
        classify = {
            "intent": self.classify_intent,
            "pii": self.classify_pii,
            "security": self.classify_security,
            "all": self.classify_combined,
        }[request.task_type]
        results = await client.decode_body(
            lambda _: [classify(text, request.options, classifiers) for text in request.texts],
            service.ROUTED_AT_ONCE_BYTES,
        )
        intents = [result["intent"] for result in results if "intent" in result]
        intents += results if request.task_type == "intent" else []
        return {
            "results": results,
            "total_count": len(results),
            "processing_time_ms": (self._clock.now() - start) * 1000,
            "statistics": _summarize([intent["classification"] for intent in intents]),
        }

    async def answer_deletion(self, client: exchange.Exchange) -> dict[str, Any]:
        """Remove the answers of names that a caller was given."""
        entries = _decode_entries(client.request.body)
        tenant = service.tenant_of(client.request.headers)
        if entries.keys:
            return {"removed": await self._routing.delete_answers(entries.keys, tenant)}
        if not (entries.all and tenant):
            raise errors.InvalidRequest(
                "expected keys, or all and an API key, by which answers are told apart",
                param="keys",
            )
        return {"removed": await self._routing.invalidate_answers(tenant)}

    def describe_cache(self) -> dict[str, Any]:
        """Return the size of the semantic cache."""
        cache = self._routing.router.cache
        return {
            "enabled": cache.settings.enabled,
            "backend": cache.settings.backend_type,
            "entries": len(cache),
            "bytes": cache.num_bytes,
            "conversations": len(self._routing.router.conversations),
        }

    async def flush_cache(self, _: exchange.Exchange) -> dict[str, Any]:
        """Remove all cached answers."""
        return {"removed": await self._routing.invalidate_answers()}

    def describe_metrics(self) -> dict[str, Any]:
        """Return the number of rules and decisions, and what was classified since the process began."""
        settings = self._routing.router.settings
        return {
            "decision_count": len(settings.decisions),
            "signal_counts": {
                "domains": len(settings.categories),
                "keywords": len(settings.keyword_rules),
                "embeddings": len(settings.embedding_rules),
                "routing_models": len(settings.model_config),
            },
            **self._routing.metrics.describe_classifications(),
        }

    def describe_classifier(self) -> dict[str, Any]:
        """Return which classifiers are loaded and what they know."""
        domain = self._routing.router.loaded.encoders.get(encoder_labels.DOMAIN)
        categories = self._profile.categories if domain is None else domain.labels
        return {
            "status": "active",
            "profile": self._routing.router.settings.encoders.profile,
            "languages": ["en"],
            "categories": sorted(categories),
            "capabilities": ["intent", "pii", "security", "batch"],
        }

    def describe_models(self) -> dict[str, Any]:
        """Return the loaded classifiers, as the original lists its models."""
        encoders = self._routing.router.loaded.encoders
        profile_name = self._routing.router.settings.encoders.profile
        return {
            "models": [
                {
                    "name": name,
                    "type": "encoder" if classifier in encoders else profile_name,
                    "path": str(encoders[classifier].directory) if classifier in encoders else "",
                    "loaded": True,
                }
                for name, classifier in (
                    ("category_classifier", encoder_labels.DOMAIN),
                    ("pii_classifier", encoder_labels.PII),
                    ("jailbreak_classifier", encoder_labels.ATTACK),
                )
            ]
        }

    def _recommend(self, text: str, classifiers: guards.RequestClassifiers) -> str:
        """Return the first model of the decision that is followed, or the default one."""
        router = self._routing.router
        matches = router.matches(router.find_signals(text, classifiers))
        decisions = [match.settings for match in matches if match.settings.mode == "enforce"]
        references = decisions[0].modelRefs if decisions else []
        return references[0].served_name if references else router.settings.default_model

    def _elapsed_ms(self, classifier: str, start: float) -> float:
        seconds = self._clock.now() - start
        self._routing.metrics.record_classification(classifier, seconds)
        return seconds * 1000


def _summarize(classifications: Sequence[dict[str, Any]]) -> dict[str, Any]:
    distribution: dict[str, int] = {}
    for result in classifications:
        distribution[result["category"]] = distribution.get(result["category"], 0) + 1
    confidences = [result["confidence"] for result in classifications]
    return {
        "category_distribution": distribution,
        "avg_confidence": sum(confidences) / len(confidences) if confidences else 0.0,
        "low_confidence_count": sum(confidence < _SPECIALIZED for confidence in confidences),
    }


def make_routes(
    routing: service.RoutingService,
    clock: clocks.Clock,
    admin_key: str | None = None,
    *,
    has_system_prompts: bool = False,
) -> exchange.HttpRouter:
    """Return the routes of the API: what only administrators may do takes `admin_key`, or requests from this host."""
    api, embeddings = ClassificationApi(routing, clock), embedding_api.SimilarityApi(routing, clock)
    admin = administration.Administration(routing, admin_key)
    error_body = functools.partial(_error_body, clock)

    def post(answer: administration.Answer) -> exchange.Handler:
        return functools.partial(_respond, answer, error_body)

    def classify(task: Task, answer: Callable[..., Any]) -> exchange.Handler:
        return post(functools.partial(api.answer_text, task, answer))

    def list_models(client: exchange.Exchange) -> None:
        client.respond(200, routing.router.list_models().body)

    routes: dict[tuple[str, str], exchange.Handler] = {
        ("POST", "/api/v1/classify/intent"): classify("intent", api.classify_intent),
        ("POST", "/api/v1/classify/pii"): classify("pii", api.classify_pii),
        ("POST", "/api/v1/classify/security"): classify("security", api.classify_security),
        ("POST", "/api/v1/classify/combined"): classify("all", api.classify_combined),
        ("POST", "/api/v1/classify/batch"): post(api.answer_batch),
        ("POST", "/api/v1/embeddings"): post(embeddings.answer_embeddings),
        ("POST", "/api/v1/similarity"): post(embeddings.answer_similarity),
        ("POST", "/api/v1/similarity/batch"): post(embeddings.answer_candidates),
        ("GET", "/api/v1/embeddings/models"): _show(embeddings.describe_models),
        ("GET", "/api/v1/response-cache/stats"): _show(api.describe_cache),
        ("POST", "/api/v1/response-cache/flush"): post(admin.restrict(api.flush_cache)),
        ("POST", "/api/v1/response-cache/invalidate"): post(api.answer_deletion),
        ("GET", "/config/classification"): _show(admin.describe_config),
        ("PUT", "/config/classification"): post(admin.restrict(admin.answer_config_change)),
        ("GET", "/metrics/classification"): _show(api.describe_metrics),
        ("GET", "/info/classifier"): _show(api.describe_classifier),
        ("GET", "/info/models"): _show(api.describe_models),
        ("GET", "/v1/models"): list_models,
        ("GET", "/health"): _show(lambda: {"status": "healthy", "service": _NAME}),
    }
    if has_system_prompts:
        path = "/config/system-prompts"
        routes["GET", path] = _show(admin.describe_system_prompts)
        routes["PUT", path] = post(admin.restrict(admin.answer_prompt_change))
    index = {"service": _NAME, "endpoints": [" ".join(route) for route in routes]}
    routes["GET", "/api/v1"] = _show(lambda: index)
    routes["GET", "/openapi.json"] = _show(lambda: _describe_api(routes))
    routes["GET", "/docs"] = lambda client: client.respond(
        200, _write_page(routes), content_type="text/html; charset=utf-8"
    )
    return exchange.HttpRouter(routes, error_body=error_body)


def _write_page(routes: Iterable[tuple[str, str]]) -> bytes:
    """Return a page of the paths and the keys of their bodies, which loads nothing from elsewhere."""
    rows = []
    for method, path in routes:
        fields = getattr(_BODIES.get(path), "__struct_fields__", ()) if method != "GET" else ()
        cells = (method, path, ", ".join(fields))
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    return (
        "<!doctype html><title>Classification API</title><h1>Classification API</h1>"
        '<p>All of it for programs: <a href="openapi.json">openapi.json</a></p>'
        f"<table><tr><th>Method<th>Path<th>Keys of the body<tr>{'<tr>'.join(rows)}</table>"
    ).encode()


def _describe_api(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the API as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0); bodies are the types that decode them."""
    template = "#/components/schemas/{name}"
    types = list(dict.fromkeys(_BODIES.values()))
    schemas, components = msgspec.json.schema_components(types, ref_template=template)
    schema_by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        operation: dict[str, Any] = {"responses": {"200": {"description": "OK"}}}
        if path in _BODIES and method != "GET":
            content = {"application/json": {"schema": schema_by_type[_BODIES[path]]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Classification API of the semantic router", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _show(describe: Callable[[], Any]) -> exchange.Handler:
    return lambda client: client.respond(200, msgspec.json.encode(describe()))


async def _respond(
    answer: administration.Answer, error_body: exchange.ErrorBody, client: exchange.Exchange
) -> None:
    """Respond with an answer, or say what is wrong with the request."""
    try:
        result = await answer(client)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        client.respond(400, error_body(400, str(error), client.request.path))
    except errors.DynamoError as error:
        status = next((s for kind, s in _STATUSES.items() if isinstance(error, kind)), 500)
        client.respond(status, error_body(status, str(error), client.request.path))
    else:
        client.respond(200, msgspec.json.encode(result))


def _error_body(clock: clocks.Clock, status: int, message: str, path: str) -> bytes:
    """Return an error in the original's shape."""
    del path
    moment = datetime.datetime.fromtimestamp(clock.wall(), datetime.UTC)
    codes = {
        400: "INVALID_INPUT",
        401: "UNAUTHORIZED",
        403: "FORBIDDEN",
        404: "NOT_FOUND",
        405: "METHOD_NOT_ALLOWED",
        503: "CLASSIFIER_UNAVAILABLE",
    }
    error = {
        "code": codes.get(status, "ERROR"),
        "message": message,
        "timestamp": moment.isoformat(timespec="seconds"),
    }
    return msgspec.json.encode({"error": error})
