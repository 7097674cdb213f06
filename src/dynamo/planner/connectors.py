"""The seam between a decision and the workers: a connector tells what there is, and orders what should be.

No connector waits until what it ordered is done. A worker that starts, one that serves and one that drains are told
apart (`PoolState`), so that decisions go on meanwhile. A worker serves when it is registered in discovery.
"""

from typing import Protocol

import msgspec

from dynamo.planner.observation import PoolState
from dynamo.planner.scaling_pipeline import Decision
from dynamo.protocols import instances
from dynamo.runtime import discovery


class Connector(Protocol):
    """Orders workers."""

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the prefill pool and the decode pool (in aggregated mode, all workers)."""
        ...

    async def scale(self, decision: Decision) -> None:
        """Order starts and drains towards `decision.replicas`, and give up `decision.withdrawals`."""
        ...

    async def close(self) -> None:
        """Stop; what becomes of the workers is the matter of the connector."""
        ...


class RegisteredWorkers:
    """The workers of one endpoint that are registered in discovery."""

    def __init__(self, registry: discovery.Discovery, endpoint: instances.EndpointName) -> None:
        self._registry = registry
        self._prefix = f"{instances.INSTANCES}{endpoint.path}/"

    async def read_ids(self) -> frozenset[str]:
        """Return the ids of the instances. Raises Unavailable."""
        return frozenset(await self._registry.get_prefix(self._prefix))


class WakeUpPromise:
    """The announcement, while no worker of a model runs, that one starts on demand: frontends then keep requests."""

    def __init__(
        self, registry: discovery.Discovery, *, namespace: str, model: str, instance_id: int
    ) -> None:
        self._registry = registry
        self._namespace, self.model = namespace, model
        self._key = f"{instances.STARTS}planner-{instance_id:x}"
        self._is_made = False

    async def update(self, *, is_asleep: bool, startup_s: float) -> None:
        """Make the promise if no worker runs, take it back if one does. Raises Unavailable."""
        if is_asleep and not self._is_made:
            start = instances.WorkerStart(
                model=self.model, namespace=self._namespace, estimate_s=startup_s
            )
            await self._registry.put(self._key, msgspec.json.encode(start))
        elif self._is_made and not is_asleep:
            await self._registry.delete(self._key)
        self._is_made = is_asleep


def endpoints(namespace: str) -> tuple[instances.EndpointName, instances.EndpointName]:
    """Return the endpoints of prefill workers and of the others."""
    return (
        instances.EndpointName(namespace, "prefill", "generate"),
        instances.EndpointName(namespace, "backend", "generate"),
    )
