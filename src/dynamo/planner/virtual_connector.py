"""The virtual connector: decisions as state in discovery, for an orchestrator of others to carry out.

    v1/planner/{namespace}/target    {"num_prefill_workers": 2, "num_decode_workers": 3, "decision_id": 7}
    v1/planner/{namespace}/scaled    {"decision_id": 7}, written by the orchestrator when that is done

The orchestrator uses `VirtualOrchestrator`: wait for a target, make it so, complete it. Until a target is completed its
missing workers count as starting; after `TIMEOUT_S` seconds the planner says that none carried it out.
"""

import asyncio

import msgspec

from dynamo.base import clock as clocks
from dynamo.planner.connectors import RegisteredWorkers
from dynamo.planner.observation import PoolState, Replicas
from dynamo.planner.scaling_pipeline import Decision
from dynamo.runtime import discovery

TIMEOUT_S = 1800.0


class ScalingTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner wants; `decision_id` rises with each change."""

    num_prefill_workers: int
    num_decode_workers: int
    decision_id: int


class ScalingDone(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator has carried out the decision with this id, and all before it."""

    decision_id: int


def target_key(namespace: str) -> str:
    """Return the key of the target in discovery."""
    return f"v1/planner/{namespace}/target"


def done_key(namespace: str) -> str:
    """Return the key of the orchestrator's answer in discovery."""
    return f"v1/planner/{namespace}/scaled"


class VirtualConnector:
    """Writes targets, and counts the workers that are registered."""

    def __init__(
        self,
        registry: discovery.Discovery,
        namespace: str,
        clock: clocks.Clock,
        registered: tuple[RegisteredWorkers, RegisteredWorkers],
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self._registered = registered
        self._target: Replicas | None = None
        self._decision_id = 0
        self._ordered_at = 0.0

    async def observe(self) -> tuple[PoolState, PoolState]:
        """Return the pools: registered workers serve, further ones of an open target are starting."""
        counts = [len(await registered.read_ids()) for registered in self._registered]
        is_done = self._target is None or await self._last_completed_id() >= self._decision_id
        age_s = self._clock.now() - self._ordered_at
        failure = (
            f"no orchestrator completed decision {self._decision_id} within {TIMEOUT_S:.0f} s"
            if not is_done and age_s > TIMEOUT_S
            else ""
        )
        targets = Replicas(counts[0], counts[1]) if self._target is None else self._target
        prefill, decode = [
            PoolState(
                num_ready=min(count, target) if not is_done else count,
                starting_since=(self._ordered_at,) * (0 if is_done else max(0, target - count)),
                num_draining=0 if is_done else max(0, count - target),
                failure=failure,
            )
            for count, target in zip(counts, targets, strict=True)
        ]
        return prefill, decode

    async def scale(self, decision: Decision) -> None:
        """Write a target if it is a new one."""
        current = decision.present if self._target is None else self._target
        if decision.replicas == current:
            return
        if self._decision_id == 0:
            self._decision_id = await self._last_completed_id()
        self._target = decision.replicas
        self._decision_id += 1
        self._ordered_at = self._clock.now()
        target = ScalingTarget(
            num_prefill_workers=decision.replicas.prefill,
            num_decode_workers=decision.replicas.decode,
            decision_id=self._decision_id,
        )
        await self._registry.put(target_key(self._namespace), msgspec.json.encode(target))

    async def close(self) -> None:
        """Leave the workers as they are."""

    async def _last_completed_id(self) -> int:
        """Return the id of the last decision that the orchestrator has carried out."""
        key = done_key(self._namespace)
        content = (await self._registry.get_prefix(key)).get(key)
        return 0 if content is None else msgspec.json.decode(content, type=ScalingDone).decision_id


class VirtualOrchestrator:
    """The client of a foreign orchestrator: wait for a target, carry it out, complete it."""

    def __init__(self, registry: discovery.Discovery, namespace: str) -> None:
        self._registry = registry
        self._namespace = namespace
        self._completed_id = 0

    async def wait(self) -> ScalingTarget:
        """Wait for a target that is not completed, and return the newest."""
        key = target_key(self._namespace)
        async for change in self._registry.watch(key):
            if isinstance(change, discovery.Put) and change.key == key:
                target = msgspec.json.decode(change.value, type=ScalingTarget)
                if target.decision_id > self._completed_id:
                    return target
        raise asyncio.CancelledError

    async def complete(self, target: ScalingTarget) -> None:
        """Tell the planner that this target and all before it are carried out."""
        self._completed_id = target.decision_id
        answer = ScalingDone(decision_id=target.decision_id)
        await self._registry.put(done_key(self._namespace), msgspec.json.encode(answer))
