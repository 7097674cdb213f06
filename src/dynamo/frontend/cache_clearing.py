"""`POST /clear_kv_blocks`: clears the prefix cache of every worker, prefill workers too.

A worker serves an endpoint of this name in the component of the endpoint that generates.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.frontend.delivery import sse
from dynamo.frontend.model_registry import registry
from dynamo.protocols import instances, model_card, model_errors
from dynamo.runtime import client
from dynamo.runtime.http import exchange

TIMEOUT_S = 10.0
SETTLE_S = 1.0  # how long discovery may take to show an endpoint


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
