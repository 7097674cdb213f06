"""Operators' routes: the state (`/health`, `/live`, `/metrics`), the KV caches of all workers, the busy thresholds.

`POST /clear_kv_blocks` clears the prefix cache of every worker, prefill workers too: each serves an endpoint of this
name in the component of the endpoint that generates.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from dynamo.base import distribution, errors
from dynamo.frontend.admission import load_thresholds
from dynamo.frontend.apis.operation import (
    ACCESS_ERRORS,
    READ_ERRORS,
    Operation,
    Operations,
    RequestHandlers,
    add_request_id,
)
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.frontend.processes import peers
from dynamo.observability import metrics
from dynamo.protocols import instances, model_card, model_errors
from dynamo.runtime import client
from dynamo.runtime.http import exchange

TIMEOUT_S = 10.0
SETTLE_S = 1.0  # how long discovery may take to show an endpoint
_THRESHOLD_PATH = "/busy_threshold"


class Live(msgspec.Struct, kw_only=True):
    """The process runs."""

    status: Literal["live"]
    message: str


class Version(msgspec.Struct, kw_only=True):
    """The release of this frontend."""

    version: str


class Healthy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker is ready, or a request would wake one. Only the holder of an API key, where keys are used, sees more."""

    status: Literal["healthy"]
    endpoints: list[str] = []
    instances: list[dict[str, Any]] = []


class Unhealthy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """No worker is ready, or the frontend is shutting down."""

    status: Literal["unhealthy"]
    message: str
    instances: list[dict[str, Any]] = []


class ClearedWorker(msgspec.Struct, kw_only=True):
    """The reply of one worker."""

    name: str
    endpoint: str
    status: str
    response: dict[str, Any] | None


class ClearedCaches(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The replies of all workers; only a message if there are no workers."""

    cleared_workers: list[ClearedWorker] = []
    failed_workers: list[ClearedWorker] = []
    message: str = ""


class ModelThresholds(msgspec.Struct, kw_only=True):
    """The load from which a worker of this model counts as busy; null disables a threshold."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None


class AllThresholds(msgspec.Struct, kw_only=True):
    """The thresholds of all models that the client's API key allows."""

    thresholds: list[ModelThresholds]


class _Worker(NamedTuple):
    """A worker, with the endpoint that clears its cache."""

    model: str
    endpoint: instances.EndpointName
    instance_id: int


class CacheClearer:
    """Clears the caches of all workers of all models at once."""

    def __init__(
        self,
        models: registry.ModelRegistry,
        connect: Callable[[instances.EndpointName], client.EndpointClient],
    ) -> None:
        self._models = models
        self._connect = connect
        self._clients: dict[instances.EndpointName, client.EndpointClient] = {}

    async def handle(self, client: exchange.Exchange) -> None:
        """Answer a request of the route."""
        client.respond(200, sse.encode(await self.clear()))

    async def clear(self) -> dict[str, Any]:
        """Clear all caches; return the outcome for each worker, in the original's form."""
        workers = self._workers()
        if not workers:
            return {"message": "No active worker groups found"}
        results = await asyncio.gather(*map(self._clear_one, workers))
        return {
            "cleared_workers": [result for result in results if result["response"] is not None],
            "failed_workers": [result for result in results if result["response"] is None],
        }

    def _workers(self) -> list[_Worker]:
        """Return all workers that keep a prefix cache."""
        generating = [model for model in self._models.ready_bases if model.can_generate]
        names = {model.name for model in generating}
        return [
            *(
                _Worker(model.name, _endpoint(instance), instance.instance_id)
                for model in generating
                for instance in model.instances
            ),
            *(
                _Worker(record.card_json.display_name, _endpoint(record), record.instance_id)
                for record in self._models.prefill_workers
                if record.card_json.display_name in names
            ),
        ]

    async def _clear_one(self, worker: _Worker) -> dict[str, Any]:
        name = f"{worker.model}-instance-{worker.instance_id:x}"
        result = {"name": name, "endpoint": str(worker.endpoint)}
        try:
            response = await self._ask(worker.endpoint, worker.instance_id)
        except errors.DynamoError as error:
            return {
                **result,
                "status": f"failed: {model_errors.client_message(error)}",
                "response": None,
            }
        return {**result, "status": "cleared", "response": response}

    async def _ask(self, name: instances.EndpointName, instance_id: int) -> dict[str, Any]:
        if name not in self._clients:
            self._clients[name] = self._connect(name)
        endpoint_client = self._clients[name]
        await endpoint_client.wait_for_instances(SETTLE_S)
        return await endpoint_client.call(
            None, reply_type=dict[str, Any], instance_id=instance_id, timeout_s=TIMEOUT_S
        )


def _endpoint(worker: instances.Instance | model_card.CardRecord) -> instances.EndpointName:
    return instances.EndpointName(worker.namespace, worker.component, instances.CLEAR_KV_BLOCKS)


def metrics_handler(metrics_registry: metrics.Registry) -> exchange.Handler:
    """Return the handler that reports the metrics of this process alone."""
    return lambda client: client.respond(
        200, metrics_registry.render(), content_type=metrics.CONTENT_TYPE
    )


def state_operations(
    handlers: RequestHandlers,
    siblings: peers.Peers,
    metrics_registry: metrics.Registry,
    can_wake: Callable[[], bool],
) -> Sequence[Operation]:
    """Return the operations that tell the state of this process, and the metrics of all processes at this port.

    Without workers it is healthy if `can_wake` says that a request wakes a model: a load balancer that sends none to
    an unhealthy frontend would keep its models asleep for ever.
    """
    api = Operations(tag="Operation")

    @api.get(
        "/health",
        "200 if a worker is ready, or a request would wake one; else 503",
        answer=Healthy,
        other_answers={503: Unhealthy},
    )
    def show_health(client: exchange.Exchange) -> None:
        served = [
            (instance, replicas.state_of(instance.instance_id))
            for model in handlers.models.ready_bases
            for replicas in model.replicas.values()
            for instance in replicas.live_instances
        ]
        instances = [  # with the id as logs and metrics write it
            {
                "instance": f"{instance.instance_id:x}",
                "state": state,
                **msgspec.to_builtins(instance),
            }
            for instance, state in served
        ]
        if handlers.is_leaving or not (served or can_wake()):
            message = "draining" if handlers.is_leaving else "No endpoints available"
            body = {"status": "unhealthy", "message": message}
            details: dict[str, Any] = {"instances": instances}
        else:
            body = {"status": "healthy"}
            endpoints = sorted({str(instance.name) for instance, _ in served})
            details = {"endpoints": endpoints, "instances": instances}
        if handlers.rights.has_valid_key(client):
            body |= details
        client.respond(200 if body["status"] == "healthy" else 503, sse.encode(body))

    @api.get("/live", "200 as long as the process runs", answer=Live)
    def show_live(client: exchange.Exchange) -> None:
        client.respond(200, b'{"status":"live","message":"Service is live"}')

    @api.post("/ping", "The same, as with vLLM", wrap=add_request_id, answer=dict[str, Any])
    @api.get("/ping", "200 as long as the process runs, as with SageMaker", answer=dict[str, Any])
    def ping(client: exchange.Exchange) -> None:
        client.respond(200, b"{}")

    @api.get("/version", "The release", answer=Version, errors=ACCESS_ERRORS)
    def show_version(client: exchange.Exchange) -> None:
        client.respond(200, sse.encode(Version(version=distribution.version())))

    async def show_metrics_of_all(client: exchange.Exchange) -> None:
        """Merge the metrics of all processes at this port."""
        pages = await siblings.ask_all("GET", "/metrics")
        pages[siblings.name or ""] = metrics_registry.render()
        merged = peers.merge_metrics({name: pages[name].decode() for name in sorted(pages)})
        client.respond(200, merged.encode(), content_type=metrics.CONTENT_TYPE)

    show_metrics = show_metrics_of_all if siblings.name else metrics_handler(metrics_registry)
    api.get("/metrics", "Metrics in Prometheus's format", answer=metrics.CONTENT_TYPE)(show_metrics)
    return api.entries


def administration_operations(
    handlers: RequestHandlers,
    clearer: CacheClearer,
    busy_workers: load_thresholds.BusyWorkers,
    siblings: peers.Peers,
) -> Sequence[Operation]:
    """Return the operations that change the state of all workers or processes."""
    api = Operations(tag="Operation")
    api.post(
        "/clear_kv_blocks",
        "Clear the KV caches of all workers",
        wrap=add_request_id,
        answer=ClearedCaches,
        errors=(*ACCESS_ERRORS, 408, 413),
    )(clearer.handle)
    api.get(
        _THRESHOLD_PATH,
        "The load from which workers count as busy",
        wrap=add_request_id,
        answer=AllThresholds,
        errors=ACCESS_ERRORS,
    )(lambda client: busy_workers.show_thresholds(client, handlers.list_visible(client)))

    @api.post(
        _THRESHOLD_PATH,
        "Change it for one model; what is left out stays, and null is no threshold",
        wrap=functools.partial(handlers.compute, load_thresholds.decode_change),
        request=load_thresholds.ThresholdChange,
        request_rules=(
            {"propertyNames": {"enum": [*load_thresholds.ThresholdChange.__struct_fields__]}},
        ),
        answer=ModelThresholds,
        errors=READ_ERRORS,
        example={"active_decode_blocks_threshold": 0.9},
    )
    async def change_thresholds(request: load_thresholds.ThresholdChange) -> dict[str, Any]:
        """Change them in this process and, if that succeeds, in the siblings at this port."""
        changed = await busy_workers.change_thresholds(request)
        await siblings.ask_all("POST", _THRESHOLD_PATH, sse.encode(request))
        return changed

    return api.entries
