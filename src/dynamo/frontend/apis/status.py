"""The state of the frontend: `/health`, `/live` and `/metrics`."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.base import distribution
from dynamo.frontend.apis.operation import ACCESS_ERRORS, ApiContext, Operation
from dynamo.frontend.delivery import sse
from dynamo.frontend.processes import peers
from dynamo.observability import metrics
from dynamo.runtime.http import exchange


class Live(msgspec.Struct, kw_only=True):
    """The process runs."""

    status: Literal["live"]
    message: str


class Version(msgspec.Struct, kw_only=True):
    """The release of this frontend."""

    version: str


class Healthy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """At least one worker is ready. Where API keys are required, only the holder of one sees more than that."""

    status: Literal["healthy"]
    endpoints: list[str] = []
    instances: list[dict[str, Any]] = []


class Unhealthy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """No worker is ready, or the frontend is shutting down."""

    status: Literal["unhealthy"]
    message: str
    instances: list[dict[str, Any]] = []


def metrics_handler(context: ApiContext) -> exchange.Handler:
    """Return the handler that reports the metrics of this process alone."""
    return lambda client: client.respond(
        200, context.metrics_registry.render(), content_type=metrics.CONTENT_TYPE
    )


def operations(context: ApiContext) -> Sequence[Operation]:
    """Return the operations of this API."""

    def show_health(client: exchange.Exchange) -> None:
        served = [
            (instance, replicas.state_of(instance.instance_id))
            for model in context.models.ready_bases
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
        is_draining = context.drain_state.is_draining
        if is_draining or not served:
            message = "draining" if is_draining else "No endpoints available"
            body = {"status": "unhealthy", "message": message}
            details: dict[str, Any] = {"instances": instances}
        else:
            body = {"status": "healthy"}
            endpoints = sorted({str(instance.name) for instance, _ in served})
            details = {"endpoints": endpoints, "instances": instances}
        if context.admission.has_valid_key(client):
            body |= details
        client.respond(200 if body["status"] == "healthy" else 503, sse.encode(body))

    async def show_metrics_of_all(client: exchange.Exchange) -> None:
        """Merge the metrics of all processes at this port."""
        pages = await context.peers.ask_all("GET", "/metrics")
        pages[context.peers.name or ""] = context.metrics_registry.render()
        merged = peers.merge_metrics({name: pages[name].decode() for name in sorted(pages)})
        client.respond(200, merged.encode(), content_type=metrics.CONTENT_TYPE)

    version = Version(version=distribution.version())
    has_siblings = bool(context.peers.name)
    return (
        Operation(
            method="GET",
            path="/health",
            handler=show_health,
            summary="200 if a worker is ready, else 503",
            tag="Operation",
            answer=Healthy,
            other_answers={503: Unhealthy},
        ),
        Operation(
            method="GET",
            path="/live",
            handler=lambda client: client.respond(
                200, b'{"status":"live","message":"Service is live"}'
            ),
            summary="200 as long as the process runs",
            tag="Operation",
            answer=Live,
        ),
        Operation(
            method="GET",
            path="/ping",
            handler=lambda client: client.respond(200, b"{}"),
            summary="200 as long as the process runs, as with SageMaker",
            tag="Operation",
            answer=dict[str, Any],
        ),
        Operation(
            method="GET",
            path="/version",
            handler=lambda client: client.respond(200, sse.encode(version)),
            summary="The release",
            tag="Operation",
            answer=Version,
            errors=ACCESS_ERRORS,
        ),
        Operation(
            method="GET",
            path="/metrics",
            handler=show_metrics_of_all if has_siblings else metrics_handler(context),
            summary="Metrics in Prometheus's format",
            tag="Operation",
            answer=metrics.CONTENT_TYPE,
        ),
    )
