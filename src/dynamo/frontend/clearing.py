"""`POST /clear_kv_blocks`: every worker forgets the keys and values that it keeps for prompts to come.

Beside the endpoint that generates, a worker serves one of this name in the same component.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.base import errors
from dynamo.frontend import models, sse
from dynamo.protocols import instances
from dynamo.runtime import client, requests
from dynamo.runtime.http import exchange

LIMIT_S = 10.0
SETTLE_S = 1.0  # how long the first look for an endpoint may take


class CacheClearing:
    """Asks all workers of all models at once."""

    def __init__(
        self,
        known: models.Models,
        plane: requests.RequestPlane,
        connect: Callable[[instances.EndpointName], client.EndpointClient],
    ) -> None:
        self._models = known
        self._plane = plane
        self._connect = connect
        self._clients: dict[instances.EndpointName, client.EndpointClient] = {}

    async def answer(self, caller: exchange.Exchange) -> None:
        """The handler of the route."""
        caller.respond(200, sse.encode(await self.clear()))

    async def clear(self) -> dict[str, Any]:
        """What came of it, as the original tells it."""
        caching = [model for model in self._models.ready_bases if model.can_generate]
        workers = [(model.name, one) for model in caching for one in model.instances]
        if not workers:
            return {"message": "No active worker groups found"}
        told = await asyncio.gather(*(self._clear_one(*worker) for worker in workers))
        return {
            "cleared_workers": [one for one in told if one["response"] is not None],
            "failed_workers": [one for one in told if one["response"] is None],
        }

    async def _clear_one(self, model: str, worker: instances.Instance) -> dict[str, Any]:
        name = instances.EndpointName(worker.namespace, worker.component, instances.CLEAR_KV_BLOCKS)
        told = {"name": f"{model}-instance-{worker.instance_id:x}", "endpoint": str(name)}
        try:
            response = await self._ask(name, worker.instance_id)
        except errors.DynamoError as error:
            return {**told, "status": f"failed: {error}", "response": None}
        return {**told, "status": "cleared", "response": response}

    async def _ask(self, name: instances.EndpointName, instance_id: int) -> dict[str, Any]:
        if name not in self._clients:
            self._clients[name] = self._connect(name)
        found = self._clients[name]
        await found.wait_for_instances(SETTLE_S)
        worker = found.instances.get(instance_id)
        if worker is None:
            raise errors.NoWorkers(f"instance {instance_id:x} does not serve {name}")
        return await requests.ask(
            self._plane,
            worker.transport[self._plane.name],
            name.path,
            None,
            reply_type=dict[str, Any],
            timeout_s=LIMIT_S,
        )
