"""Prefill workers that took a prompt and did not answer in time: they get no prompt until they have answered a probe.

Their process may be well and only their engine hang, so no connection breaks, and each prompt that they get waits for
its whole time limit. Or their host is silent, which costs each prompt the limit of silence. A probe is a prompt of one
token; it is repeated until it is answered, by whatever but silence, or the worker is gone.
"""

import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.protocols import blocks, generate

PROBE_S = 10.0  # the time limit of a probe
PAUSE_S = 1.0  # between two probes
_logger = logging.getLogger(__name__)
SendProbe = Callable[[int, generate.Request], Coroutine[Any, Any, object]]


class HungWorkers:
    """The hung workers of one pool. `send_probe` sends a request to an instance and returns when it has ended."""

    def __init__(
        self,
        send_probe: SendProbe,
        is_present: Callable[[int], bool],
        clock: clocks.Clock,
    ) -> None:
        self._send_probe = send_probe
        self._is_present = is_present
        self._clock = clock
        self._hung: set[int] = set()
        self._tasks = tasks.Tasks()

    def without(self, instance_ids: Collection[int]) -> Collection[int]:
        """Return the instances that are not known to hang."""
        return [i for i in instance_ids if i not in self._hung] if self._hung else instance_ids

    def report(self, instance_id: int, request: generate.Request) -> None:
        """Record that a worker has not answered this request in time, and begin to probe it."""
        if instance_id not in self._hung:
            self._hung.add(instance_id)
            _logger.warning(
                "prefill worker %x was silent, or did not answer in time: it gets no prompts until it answers a probe",
                instance_id,
            )
            self._tasks.start("probe a hung prefill worker", self._probe(instance_id, request))

    def report_loss(
        self, instance_id: int, request: generate.Request, error: errors.DynamoError
    ) -> None:
        """Record that a worker was lost with this request, if it is silent: one that died is not probed."""
        if isinstance(error, errors.WorkerLost) and not isinstance(error, errors.WorkerDied):
            self.report(instance_id, request)

    async def close(self) -> None:
        """Stop probing. Idempotent."""
        await self._tasks.close()

    async def _probe(self, instance_id: int, late: generate.Request) -> None:
        probe = generate.Request(
            id=f"{late.id}-probe",
            model=late.model,
            token_ids=late.token_ids[: blocks.TOKEN_BYTES],
            stop_conditions=generate.StopConditions(max_tokens=1),
            sampling_options=generate.SamplingOptions(temperature=0.0),
        )
        while self._is_present(instance_id) and not await self._is_answered(instance_id, probe):
            await self._clock.sleep(PAUSE_S)
        self._hung.discard(instance_id)
        _logger.info("prefill worker %x answers again, or is gone", instance_id)

    async def _is_answered(self, instance_id: int, probe: generate.Request) -> bool:
        try:
            async with self._clock.timeout(PROBE_S):
                await self._send_probe(instance_id, probe)
        except (TimeoutError, errors.WorkerLost, errors.Unavailable, errors.DeadlineExceeded):
            return False
        except errors.DynamoError:  # it has no blocks to give away, or refuses: its engine works
            return True
        return True
