"""`GET /v1/models`: the models that are served, in OpenAI's form, or in Anthropic's for its clients; and Ollama's form.

And what an operator does to a model on demand: `POST /models/load`, `/models/unload` (both named as in llama.cpp's
server), `/models/pin` and `/models/unpin`. The process that loads the models decides (`dynamo serve A B`).
"""

import functools
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import xxhash

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_NAME,
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import instances, model_errors
from dynamo.runtime import client
from dynamo.runtime.http import exchange, json_body

PATH = "/v1/models"
TIMEOUT_S = 10.0
SETTLE_S = 1.0  # how long discovery may take to show the endpoint
_SUMMARIES: dict[instances.ModelAction, str] = {
    "load": "Load a model on demand before a request comes for it",
    "unload": "Unload a model on demand that has no requests",
    "pin": "Load a model on demand, and keep it loaded",
    "unpin": "Let a model on demand be unloaded again",
}


class Model(msgspec.Struct, kw_only=True):
    """A model that takes requests."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: int
    max_model_len: int
    root: str
    parent: str | None
    capabilities: list[str]
    num_workers: int
    adapters: list[str]


class ModelList(msgspec.Struct, kw_only=True):
    """All models that the client's API key allows."""

    object: Literal["list"]
    data: list[Model]


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is meant."""

    model: str


class ChangedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The phase of the model before the change, which is carried out within a second."""

    success: Literal[True]
    model: str
    phase: Literal["unloaded", "loading", "loaded", "unloading"]


class ModelChanger:
    """Asks the processes that load models on demand for changes."""

    def __init__(
        self,
        list_on_demand: Callable[[], Collection[instances.WorkerStart]],
        connect: Callable[[instances.EndpointName], client.EndpointClient],
    ) -> None:
        self._list_on_demand = list_on_demand
        self._connect = connect
        self._clients: dict[instances.EndpointName, client.EndpointClient] = {}

    async def change(self, action: instances.ModelAction, named: NamedModel) -> dict[str, Any]:
        """Have a model changed. Raises ModelNotFound, Conflict, Unavailable, WorkerLost."""
        starts = {start.model: start for start in self._list_on_demand() if start.loader}
        start = starts.get(named.model)
        if start is None:
            expected = f"one of {', '.join(starts)}" if starts else "one of `dynamo serve A B`"
            raise model_errors.ModelNotFound(
                f"expected a model that is loaded on demand, {expected}, got {named.model!r}"
            )
        endpoint = instances.loader_endpoint(start.namespace)
        if endpoint not in self._clients:
            self._clients[endpoint] = self._connect(endpoint)
        loader = self._clients[endpoint]
        await loader.wait_for_instances(SETTLE_S)
        change = instances.ModelChange(model=named.model, action=action)
        answer = await loader.call(
            change, reply_type=dict[str, str], instance_id=start.loader, timeout_s=TIMEOUT_S
        )
        return {"success": True, "model": named.model, **answer}


def operations(
    handlers: RequestHandlers,
    list_on_demand: Callable[[], Collection[instances.WorkerStart]],
    connect: Callable[[instances.EndpointName], client.EndpointClient],
) -> Sequence[Operation]:
    """Return the operations that show models, and those that change models on demand."""
    models, rights = handlers.models, handlers.rights
    api = Operations(wrap=add_request_id, tag="OpenAI")

    @api.get(PATH, "The models that are served", answer=ModelList, errors=ACCESS_ERRORS)
    def list_models(client: exchange.Exchange) -> None:
        visible = handlers.list_visible(client)
        rows = [_model_object(model) for model in visible]
        names = {model.name for model in visible}
        rows += [
            _unloaded_object(start)
            for start in list_on_demand()
            if start.model not in names and rights.may_see(client, start.model)
        ]
        rows += list_name_of_choice(handlers, client, rows, "id")
        if "anthropic-version" in client.request.headers:
            client.respond(200, sse.encode(_anthropic_page(rows)))
        else:
            client.respond(200, sse.encode({"object": "list", "data": rows}))

    @api.get(f"{PATH}/{ANY_NAME}", "One of them", answer=Model, errors=(*ACCESS_ERRORS, 404))
    def show_model(client: exchange.Exchange) -> None:
        is_anthropic = "anthropic-version" in client.request.headers
        shown = client.request.path.removeprefix(PATH + "/")
        try:
            name = handlers.default_of(client, shown)
            model = models.get(name)
            start = next((start for start in list_on_demand() if start.model == name), None)
            if model is None and start is not None and rights.may_see(client, name):
                row = _unloaded_object(start)
            else:
                row = _model_object(models.find(name, rights.model_filter(client)))
            if shown != name:
                row["id"] = shown
            client.respond(200, sse.encode(_anthropic_model(row) if is_anthropic else row))
        except errors.DynamoError as error:
            dialect = error_dialects.ANTHROPIC if is_anthropic else error_dialects.OPENAI
            delivery.respond_error(client, error, dialect)

    changer = ModelChanger(list_on_demand, connect)
    return (*api.entries, *_change_operations(handlers, changer))


def _change_operations(handlers: RequestHandlers, changer: ModelChanger) -> Sequence[Operation]:
    api = Operations(tag="Operation")
    decode = json_body.RequestDecoder(NamedModel).decode
    for action, summary in _SUMMARIES.items():
        change: Callable[[NamedModel], Awaitable[Any]] = functools.partial(changer.change, action)
        api.post(
            f"/models/{action}",
            summary,
            wrap=functools.partial(handlers.compute, decode),
            request=NamedModel,
            answer=ChangedModel,
            errors=(*READ_ERRORS, 409),
        )(change)
    return api.entries


def list_name_of_choice(
    handlers: RequestHandlers,
    client: exchange.Exchange,
    rows: Sequence[dict[str, Any]],
    *name_fields: str,
) -> Sequence[dict[str, Any]]:
    """Return the row of the name that asks the semantic router to choose: that of its default model, if it is listed.

    It belongs behind all others, for clients without a choice take the first.
    """
    semantic = handlers.pipeline.semantic
    if semantic is None:
        return ()
    default = handlers.default_of(client, semantic.listed_name)
    names = dict.fromkeys(name_fields, semantic.listed_name)
    return [row | names for row in rows if row[name_fields[0]] == default]


def _anthropic_page(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the models in Anthropic's form, all on one page."""
    models = [_anthropic_model(row) for row in rows]
    return {
        "data": models,
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }


def _anthropic_model(row: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(row["created"], tz=UTC)
    return {
        "type": "model",
        "id": row["id"],
        "display_name": row["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": row["context_window"],
        "max_tokens": row["context_window"],
        "capabilities": None,
    }


def _unloaded_object(start: instances.WorkerStart) -> dict[str, Any]:
    """Return a model that is loaded when a request comes for it."""
    return _make_object(start.model, 0, start.context_length or 0)


def _model_object(model: RegisteredModel) -> dict[str, Any]:
    cards = [card for replicas in model.replicas.values() for card in replicas.cards.values()]
    adapters = {name for card in cards for name in card.lora_names if model.base is None}
    return _make_object(
        model.name,
        model.card.created,
        model.card.context_length,
        None if model.base is None else model.base.name,
        capabilities=model.capabilities,
        num_workers=len(model.instances),
        adapters=sorted(adapters),
    )


def _make_object(
    name: str, created: int, context_length: int, parent: str | None = None, **known: Any
) -> dict[str, Any]:
    """Return a model in OpenAI's form, with what is known of its workers."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dynamo",
        "context_window": context_length,
        "max_model_len": context_length,
        "root": parent or name,
        "parent": parent,
        **({"capabilities": [], "num_workers": 0, "adapters": []} | known),
    }


def describe_for_ollama(model: RegisteredModel) -> dict[str, Any]:
    """Return what Ollama's lists tell of a served model; no sizes and families, for the frontend sees no weights."""
    card, base = model.card, "" if model.base is None else model.base.name
    checksums = "".join(sorted(card.checksums.values())) + card.weights
    return _ollama_row(model.name, card.created, checksums, base)


def describe_unloaded_for_ollama(start: instances.WorkerStart) -> dict[str, Any]:
    """Return the same of a model on demand, of which little is known before its load."""
    return _ollama_row(start.model, 0, start.model)


def _ollama_row(name: str, created: int, hashed: str, parent: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": format_time(created),
        "size": 0,
        "digest": xxhash.xxh3_128_hexdigest(hashed.encode()),
        "details": {
            "parent_model": parent,
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def format_time(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it (RFC 3339)."""
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat().replace("+00:00", "Z")
