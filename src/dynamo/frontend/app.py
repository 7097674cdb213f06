"""The routes of the frontend, and what is not generation: models, health, metrics."""

import html
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo.base import errors
from dynamo.frontend import (
    apis,
    cache_clearing,
    embeddings,
    pipeline,
    responses,
    roads,
    token_counts,
)
from dynamo.frontend.admission import controller
from dynamo.frontend.answer import delivery, sse
from dynamo.frontend.description import pages
from dynamo.frontend.kserve import routes
from dynamo.frontend.model_registry import registry
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.frontend.processes import peers, shared_responses
from dynamo.observability import metrics
from dynamo.protocols import anthropic_errors, kserve_errors, openai_errors
from dynamo.runtime.http import exchange

_MODELS = "/v1/models/"
_MESSAGES = "/v1/messages"
_JSON = "application/json"
_LINKS = (
    ("/docs", "every route, with a line of curl"),
    ("/openapi.json", "the same for programs"),
    ("/v1/models", "what is served"),
    ("/health", "whether somebody can answer"),
    ("/metrics", "for Prometheus"),
)


def error_body(status: int, message: str, path: str) -> bytes:
    """What the HTTP server refuses by itself, in the shape of the API that was asked."""
    return dialect_of(path).refusal(status, message)


def dialect_of(path: str) -> delivery.Dialect:
    """How the API at this path tells errors."""
    if path.startswith(_MESSAGES):
        return anthropic_errors
    return kserve_errors if path.startswith(routes.PREFIX) else openai_errors


class App:
    """Answers all requests of one frontend."""

    def __init__(
        self,
        answers: roads.Roads,
        known: registry.ModelRegistry,
        remembered: responses.Responses,
        caches: cache_clearing.CacheClearer,
        registry: metrics.Registry,
        counter: controller.AdmissionController,
        others: peers.Peers,
        shared: shared_responses.SharedResponses,
    ) -> None:
        self._pipeline = answers.text
        self._models = known
        self._registry = registry
        self._desk = counter
        self._siblings = others
        self.is_draining = False
        self._description = pages.Description()
        counts = token_counts.TokenCounts(known, remembered)
        tensors = routes.KserveRoutes(
            answers.text, known, counter, self._accepts, is_draining=lambda: self.is_draining
        )
        self.routes = exchange.HttpRouter(
            {
                ("POST", "/v1/chat/completions"): self._generates(apis.CHAT),
                ("POST", "/v1/completions"): self._generates(apis.COMPLETIONS),
                ("POST", "/v1/responses"): shared.wrap_continuing(self._generates(remembered.api)),
                ("POST", responses.PATH + "input_tokens"): shared.wrap_continuing(
                    self._computes(counts.of_response)
                ),
                ("GET", responses.PATH + "*"): _identified(
                    shared.wrap_lookup(responses.PATH, remembered.show)
                ),
                ("DELETE", responses.PATH + "*"): _identified(
                    shared.wrap_lookup(responses.PATH, remembered.delete)
                ),
                ("POST", _MESSAGES): self._generates(apis.MESSAGES),
                ("POST", _MESSAGES + "/count_tokens"): self._computes(
                    counts.of_message, anthropic_errors
                ),
                ("POST", "/v1/embeddings"): self._embeds(answers.vectors),
                ("POST", "/tokenize"): self._computes(counts.tokenize),
                ("POST", "/detokenize"): self._computes(counts.detokenize),
                ("POST", "/clear_kv_blocks"): _identified(caches.answer),
                ("GET", "/busy_threshold"): _identified(counter.thresholds.show),
                ("POST", "/busy_threshold"): self._computes(self._change_thresholds),
                **tensors.table(),
                ("GET", "/v1/models"): _identified(self._list_models),
                ("GET", _MODELS + "*"): _identified(self._show_model),
                ("GET", "/health"): self._health,
                ("GET", "/live"): _live,
                ("GET", "/metrics"): self._all_metrics if others.name else self._metrics,
                ("GET", "/openapi.json"): self._description.show,
                ("GET", "/docs"): self._docs,
                ("GET", "/"): self._status_page,
            },
            error_body=error_body,
        )
        self.sibling_routes: peers.PeerRoutes = {
            ("GET", "/metrics"): self._metrics,
            ("POST", "/busy_threshold"): self._computes(counter.thresholds.change),
            **shared.routes,
        }

    def _generates(self, api: apis.Api[Any, Any]) -> exchange.Handler:
        def handle(caller: exchange.Exchange) -> Awaitable[None] | None:
            return (
                self._pipeline.answer(api, caller) if self._accepts(caller, api.dialect) else None
            )

        return handle

    def _embeds(self, vectors: embeddings.Embeddings) -> exchange.Handler:
        return lambda caller: (
            vectors.answer(caller) if self._accepts(caller, openai_errors) else None
        )

    def _computes(
        self,
        answer: Callable[[bytes], Awaitable[Any]],
        dialect: delivery.Dialect = openai_errors,
    ) -> exchange.Handler:
        """For what the frontend answers by itself: from body to body."""

        async def handle(caller: exchange.Exchange) -> None:
            if not self._accepts(caller, dialect):
                return
            try:
                body = sse.encode(await answer(caller.request.body))
            except errors.DynamoError as error:
                delivery.respond_error(caller, error, dialect)
            else:
                caller.respond(200, body)

        return _identified(handle)

    def _accepts(self, caller: exchange.Exchange, dialect: delivery.Dialect) -> bool:
        """Whether the request may go on; if not, it is answered."""
        if self.is_draining:
            error = errors.Unavailable("this frontend is shutting down: try again")
            delivery.respond_error(caller, error, dialect)
            return False
        kind = caller.request.headers.get("content-type", _JSON)
        if kind != _JSON and kind.partition(";")[0].strip().lower() != _JSON:
            message = f"expected the header Content-Type: application/json, got {kind[:100]!r}"
            caller.respond(415, dialect.refusal(415, message))
            return False
        return True

    def _list_models(self, caller: exchange.Exchange) -> None:
        known = [one for one in self._models.ready if self._desk.may_see(caller, one.name)]
        data = [_model_object(model) for model in known]
        caller.respond(200, sse.encode({"object": "list", "data": data}))

    def _show_model(self, caller: exchange.Exchange) -> None:
        try:
            model = self._models.find(caller.request.path.removeprefix(_MODELS))
            self._desk.check_may_see(caller, model.name)
            caller.respond(200, sse.encode(_model_object(model)))
        except errors.DynamoError as error:
            delivery.respond_error(caller, error)

    def _health(self, caller: exchange.Exchange) -> None:
        found = [one for model in self._models.ready_bases for one in model.instances]
        message = "draining" if self.is_draining else "" if found else "No endpoints available"
        if message:
            body = {"status": "unhealthy", "message": message, "instances": found}
            caller.respond(503, sse.encode(body))
            return
        endpoints = sorted({str(one.name) for one in found})
        body = {"status": "healthy", "endpoints": endpoints, "instances": found}
        caller.respond(200, sse.encode(body))

    def _metrics(self, caller: exchange.Exchange) -> None:
        caller.respond(200, self._registry.render(), content_type=metrics.CONTENT_TYPE)

    def _docs(self, caller: exchange.Exchange) -> None:
        ready = self._models.ready
        self._description.show_page(caller, ready[0].name if ready else "MODEL")

    async def _all_metrics(self, caller: exchange.Exchange) -> None:
        """Those of all processes at this port."""
        found = await self._siblings.ask_all("GET", "/metrics")
        found[self._siblings.name or ""] = self._registry.render()
        page = peers.merge_metrics({name: found[name].decode() for name in sorted(found)})
        caller.respond(200, page.encode(), content_type=metrics.CONTENT_TYPE)

    async def _change_thresholds(self, body: bytes) -> dict[str, Any]:
        """At all processes at this port, once it is known to make sense."""
        changed = await self._desk.thresholds.change(body)
        await self._siblings.ask_all("POST", "/busy_threshold", body)
        return changed

    def _status_page(self, caller: exchange.Exchange) -> None:
        served = "".join(
            f"<li>{html.escape(model.name)}: {len(model.instances)} worker(s)</li>"
            for model in self._models.ready
        )
        links = "".join(f'<li><a href="{path}">{path}</a>: {what}</li>' for path, what in _LINKS)
        page = (
            "<!doctype html><meta charset=utf-8><title>Dynamo</title><h1>Dynamo frontend</h1>"
            f"<h2>Models</h2><ul>{served or '<li>none: start a worker</li>'}</ul>"
            f"<h2>See also</h2><ul>{links}</ul>"
        )
        caller.respond(200, page.encode(), content_type="text/html; charset=utf-8")


def _identified(handler: exchange.Handler) -> exchange.Handler:
    """Whatever is answered tells the request's id, as answers that are generated do."""

    def handle(caller: exchange.Exchange) -> Awaitable[None] | None:
        caller.headers = pipeline.id_headers(caller, apis.REQUEST_ID_HEADERS)
        return handler(caller)

    return handle


def _live(caller: exchange.Exchange) -> None:
    caller.respond(200, b'{"status":"live","message":"Service is live"}')


def _model_object(model: RegisteredModel) -> dict[str, Any]:
    told = {
        "id": model.name,
        "object": "model",
        "created": model.card.created,
        "owned_by": "dynamo",
        "context_window": model.card.context_length,
    }
    return told if model.base is None else {**told, "parent": model.base.name}
