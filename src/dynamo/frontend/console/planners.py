"""The planners of the frontend's namespaces, asked for their reports while a console shows them."""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from dynamo.base import errors
from dynamo.frontend.model_registry import registry
from dynamo.protocols import instances, planner_report
from dynamo.runtime import client, component

_FIND_S = 0.5  # for discovery to show the planners of a namespace, the first time
_ANSWER_S = 5.0


class PlannerPage(msgspec.Struct, frozen=True, kw_only=True):
    """The reports of all planners, those that act first."""

    planners: Sequence[planner_report.PlannerReport]


class Planners:
    """Finds the planners of the models' namespaces."""

    def __init__(
        self,
        runtime: component.DistributedRuntime,
        models: registry.ModelRegistry,
        namespace: str | None,
    ) -> None:
        self._runtime, self._models, self._namespace = runtime, models, namespace
        self._clients: dict[str, client.EndpointClient] = {}

    async def ask(self, query: planner_report.PlannerQuery) -> PlannerPage:
        """Ask all planners; one that does not answer is left out."""
        namespaces = {
            endpoint.namespace for model in self._models.ready for endpoint in model.replicas
        }
        for namespace in (namespaces | {self._namespace or "dynamo"}) - self._clients.keys():
            name = instances.EndpointName(namespace, "planner", "decisions")
            self._clients[namespace] = endpoint = self._runtime.client(name)
            with contextlib.suppress(errors.NoWorkers):
                await endpoint.wait_for_instances(_FIND_S)
        reports = await asyncio.gather(
            *(
                self._ask_one(endpoint, instance_id, query)
                for endpoint in self._clients.values()
                for instance_id in list(endpoint.instances)
            )
        )
        answered = [report for report in reports if report is not None]
        answered.sort(key=lambda report: [not each.is_leader for each in report.decisions[:1]])
        return PlannerPage(planners=answered)

    async def _ask_one(
        self, endpoint: client.EndpointClient, instance_id: int, query: planner_report.PlannerQuery
    ) -> planner_report.PlannerReport | None:
        try:
            return await endpoint.call(
                query,
                reply_type=planner_report.PlannerReport,
                instance_id=instance_id,
                timeout_s=_ANSWER_S,
            )
        except errors.DynamoError:
            return None
