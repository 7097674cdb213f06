"""The prefill queue: prompts that wait for a prefill worker.

Two implementations: `DirectQueue`, here, and `ticket_queue.TicketQueue`, which prefill workers share.
`tests/contract/test_prefill_queues.py` runs one suite over both.

`DirectQueue` needs no service: a prompt goes at once to the worker to which we gave the fewest, and waits there. The
open stream acknowledges it: a worker that dies, or refuses because it is full, breaks the stream, and the prompt goes
to another. Nothing waits longer than the time it was given.
"""

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.base import errors
from dynamo.disagg import prefill_answer
from dynamo.protocols import generate, kv_transfer
from dynamo.runtime import client

ANOTHER_MAY = (errors.WorkerLost, errors.Unavailable, errors.EngineFailed)  # succeed


class PrefillQueue(Protocol):
    """Where prompts go to be computed."""

    @property
    def size(self) -> int | None:
        """Prompts that wait where the fewest do; None if there is nobody to compute them."""
        ...

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Have its prompt computed; gives the parameters that say where its blocks are.

        Raises what the last worker failed with, NoWorkers, or DeadlineExceeded.
        """
        ...


class DirectQueue:
    """Straight to the workers."""

    def __init__(
        self,
        workers: Callable[[], Sequence[int]],
        asked: client.EndpointClient,
        retried: Callable[[], None] = lambda: None,
    ) -> None:
        """`workers` are those that can be asked now, `retried` is called when a prompt goes to another worker."""
        self._workers = workers
        self._client = asked
        self._retried = retried
        self._num_given: collections.Counter[int] = collections.Counter()

    @property
    def size(self) -> int | None:
        """One that is being computed does not wait."""
        ids = self._usable(())
        return max(0, min(self._num_given[i] for i in ids) - 1) if ids else None

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """See `PrefillQueue`."""
        tried: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    chosen = self._choose(tried)
                    try:
                        return await self._ask(chosen, request, timeout_s)
                    except ANOTHER_MAY:
                        tried.append(chosen)
                        if not self._usable(tried):
                            raise
                        self._retried()
        except TimeoutError:
            raise late(timeout_s) from None

    def _usable(self, tried: Sequence[int]) -> Sequence[int]:
        return self._client.usable(self._workers(), tried)

    def _choose(self, tried: Sequence[int]) -> int:
        ids = self._usable(tried)
        if not ids:
            raise errors.NoWorkers("there is no prefill worker to ask")
        return min(ids, key=self._num_given.__getitem__)

    async def _ask(
        self, instance_id: int, request: generate.Request, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        self._num_given[instance_id] += 1
        try:
            return await ask(self._client, instance_id, request, timeout_s=timeout_s)
        finally:
            self._num_given[instance_id] -= 1
            if not self._num_given[instance_id]:
                del self._num_given[instance_id]


async def ask(
    workers: client.EndpointClient, instance_id: int, request: generate.Request, *, timeout_s: float
) -> kv_transfer.KvTransferParams:
    """Have one worker compute a prompt; it stops if we are cancelled. Raises what it failed with."""
    answer = prefill_answer.PrefillAnswer()
    stream = await workers.open(request, answer, instance_id=instance_id, timeout_s=timeout_s)
    try:
        return await answer.wait()
    finally:
        stream.cancel()


def late(timeout_s: float) -> errors.DeadlineExceeded:
    """What a prompt ends with that took too long."""
    return errors.DeadlineExceeded(
        f"no prefill worker has computed the prompt within {timeout_s:g} s"
    )
