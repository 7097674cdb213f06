"""`GET /v1/models`: the models that are served, in OpenAI's form, or in Anthropic's for its clients."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dynamo.base import errors
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    ANY_NAME,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.delivery import delivery, sse
from dynamo.frontend.model_registry.registered_model import RegisteredModel
from dynamo.protocols import instances
from dynamo.runtime.http import exchange

PATH = "/v1/models"


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


def operations(
    handlers: RequestHandlers, list_on_demand: Callable[[], Collection[instances.WorkerStart]]
) -> Sequence[Operation]:
    """Return the operations of this API."""
    models, rights = handlers.models, handlers.rights
    api = Operations(wrap=add_request_id, tag="OpenAI")

    @api.get(PATH, "The models that are served", answer=ModelList, errors=ACCESS_ERRORS)
    def list_models(client: exchange.Exchange) -> None:
        visible = [model for model in models.ready if rights.may_see(client, model.name)]
        rows = [_model_object(model) for model in visible]
        names = {model.name for model in visible}
        rows += [
            _unloaded_object(start)
            for start in list_on_demand()
            if start.model not in names and rights.may_see(client, start.model)
        ]
        if "anthropic-version" in client.request.headers:
            client.respond(200, sse.encode(_anthropic_page(rows)))
        else:
            client.respond(200, sse.encode({"object": "list", "data": rows}))

    @api.get(f"{PATH}/{ANY_NAME}", "One of them", answer=Model, errors=(*ACCESS_ERRORS, 404))
    def show_model(client: exchange.Exchange) -> None:
        try:
            model = models.find(client.request.path.removeprefix(PATH + "/"))
            rights.check_may_see(client, model.name)
            row = _model_object(model)
            is_anthropic = "anthropic-version" in client.request.headers
            client.respond(200, sse.encode(_anthropic_model(row) if is_anthropic else row))
        except errors.DynamoError as error:
            delivery.respond_error(client, error, error_dialects.OPENAI)

    return api.entries


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
        "max_input_tokens": row["context_window"],
        "max_tokens": row["context_window"],
        "capabilities": None,
    }


def _unloaded_object(start: instances.WorkerStart) -> dict[str, Any]:
    """Return a model that is loaded when a request comes for it."""
    return {
        "id": start.model,
        "object": "model",
        "created": 0,
        "owned_by": "dynamo",
        "context_window": start.context_length or 0,
        "max_model_len": start.context_length or 0,
        "root": start.model,
        "parent": None,
        "capabilities": [],
        "num_workers": 0,
        "adapters": [],
    }


def _model_object(model: RegisteredModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.card.created,
        "owned_by": "dynamo",
        "context_window": model.card.context_length,
        "max_model_len": model.card.context_length,
        "root": model.name if model.base is None else model.base.name,
        "parent": None if model.base is None else model.base.name,
        "capabilities": model.capabilities,
        "num_workers": len(model.instances),
        "adapters": sorted(
            {
                name
                for replicas in model.replicas.values()
                for card in replicas.cards.values()
                for name in card.lora_names
                if model.base is None
            }
        ),
    }
