"""`POST /clear_kv_blocks`: every worker, prefill workers too, forgets the keys and values that it keeps for prompts to
come.

Beside the endpoint that generates, a worker serves one of this name in the same component.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.frontend.answer import sse
from dynamo.frontend.model_registry import registry
from dynamo.protocols import instances, model_card
from dynamo.runtime import client, requests
from dynamo.runtime.http import exchange

LIMIT_S = 10.0
SETTLE_S = 1.0  # how long the first look for an endpoint may take


class _Worker(NamedTuple):
    """Who is asked to forget."""

    model: str
    endpoint: instances.EndpointName
    instance_id: int


class CacheClearer:
    """Asks all workers of all models at once."""

    def __init__(
        self,
        known: registry.ModelRegistry,
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
        workers = self._workers()
        if not workers:
            return {"message": "No active worker groups found"}
        told = await asyncio.gather(*map(self._clear_one, workers))
        return {
            "cleared_workers": [one for one in told if one["response"] is not None],
            "failed_workers": [one for one in told if one["response"] is None],
        }

    def _workers(self) -> list[_Worker]:
        """All that keep something."""
        answering = [model for model in self._models.ready_bases if model.can_generate]
        names = {model.name for model in answering}
        return [
            *(
                _Worker(model.name, _endpoint(one), one.instance_id)
                for model in answering
                for one in model.instances
            ),
            *(
                _Worker(one.card_json.display_name, _endpoint(one), one.instance_id)
                for one in self._models.prefill_workers
                if one.card_json.display_name in names
            ),
        ]

    async def _clear_one(self, worker: _Worker) -> dict[str, Any]:
        name = f"{worker.model}-instance-{worker.instance_id:x}"
        told = {"name": name, "endpoint": str(worker.endpoint)}
        try:
            response = await self._ask(worker.endpoint, worker.instance_id)
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
        return await requests.call(
            self._plane,
            worker.transport[self._plane.name],
            name.path,
            None,
            reply_type=dict[str, Any],
            timeout_s=LIMIT_S,
        )


def _endpoint(worker: instances.Instance | model_card.CardRecord) -> instances.EndpointName:
    return instances.EndpointName(worker.namespace, worker.component, instances.CLEAR_KV_BLOCKS)
