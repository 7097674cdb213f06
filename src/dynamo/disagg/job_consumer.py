"""The prefill worker's end of a shared queue: take a job, get the lease on its prompt, wait until that is over.

The prompt itself then comes as any other request does, from the decode worker that owns it (`shared_queue`). A job is
acknowledged when the decode worker says that it is over: it knows where the blocks are, or does not need them any more.
From then on the blocks are kept for a time that `protocols.kv_transfer` bounds; to keep the job until they are copied
as well would compute prompts twice that their decode worker answers in any case.

A worker takes only what it is about to compute, and extends its hold on the job meanwhile. A draining worker takes
nothing more, and gives back the jobs that still arrive.
"""

import asyncio
import contextlib
import logging

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, tasks
from dynamo.disagg import metrics, shared_queue
from dynamo.runtime import requests, work_queue

NUM_JOBS = 2  # at once: one is computed, the next is there when it ends
PULL_S = 1.0  # for so long a draining worker may wait for a job that it gives back
REJOIN_S = 0.5  # pause after a queue that did not answer
PAUSE_S = 0.2  # pause after a refused lease, or an unreachable decode worker
LEASE_S = 600.0  # the decode worker's own time limit ends it long before
CLOSE_S = 2 * PULL_S
MAX_DELIVERIES = 3  # of a job, of which the decode worker cannot be reached
_logger = logging.getLogger(__name__)
_decode_job = msgspec.msgpack.Decoder(shared_queue.PrefillJob).decode


class PrefillJobConsumer:
    """A lifecycle hook of a prefill worker's host."""

    def __init__(
        self,
        join: shared_queue.JoinQueue,
        plane: requests.RequestPlane,
        instance_id: int,
        counters: metrics.PrefillJobMetrics,
        clock: clocks.Clock,
    ) -> None:
        self._join = join
        self._plane = plane
        self._instance_id = instance_id
        self._counters = counters
        self._clock = clock
        self._is_leaving = False
        self._consumers: list[asyncio.Task[None]] = []
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Begin to take jobs. Raises ConfigError if there is no server for the queue."""
        queues = [await shared_queue.join_at_start(self._join) for _ in range(NUM_JOBS)]
        self._consumers = [
            self._tasks.start("take prefill jobs", self._consume(queue)) for queue in queues
        ]

    async def leave(self) -> None:
        """Take no more jobs; those with a lease go on."""
        self._is_leaving = True

    async def close(self) -> None:
        """Wait for the jobs that end in time, and end."""
        self._is_leaving = True
        if self._consumers:
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(CLOSE_S):
                    await asyncio.wait(self._consumers)
        await self._tasks.close()

    async def _consume(self, queue: work_queue.WorkQueue) -> None:
        while not self._is_leaving:
            try:
                item = await queue.pull(PULL_S)
                if item is not None:
                    await self._handle_job(item)
            except errors.Unavailable as error:
                _logger.warning("the prefill queue: %s", error)
                await self._clock.sleep(REJOIN_S)
                queue = await self._rejoin(queue)
        await queue.close()

    async def _rejoin(self, queue: work_queue.WorkQueue) -> work_queue.WorkQueue:
        """Join again: a server that lost its data does not know the queue any more."""
        try:
            joined = await self._join()
        except (errors.ConfigError, errors.Unavailable) as error:
            _logger.debug("could not join the prefill queue again: %s", error)
            return queue
        await queue.close()
        return joined

    async def _handle_job(self, item: work_queue.WorkItem) -> None:
        """Work on one job until its lease is over. Raises Unavailable if the queue is lost."""
        if self._is_leaving:
            await self._give_back(item)
            return
        extending = self._tasks.start("keep a prefill job", self._keep_item(item))
        try:
            is_over = await self._request_lease(item)
        except (errors.DynamoError, msgspec.DecodeError, KeyError) as error:
            await self._handle_unreachable(item, error)
            return
        finally:
            extending.cancel()
        if is_over:
            await item.acknowledge()
            self._counters.done.inc()
        else:
            await self._give_back(item)
            await self._clock.sleep(
                PAUSE_S
            )  # so that other workers, which may get the lease, take it

    async def _give_back(self, item: work_queue.WorkItem, *, after_s: float = 0.0) -> None:
        await item.give_back(after_s=after_s)
        self._counters.given_back.inc()

    async def _handle_unreachable(self, item: work_queue.WorkItem, error: Exception) -> None:
        """Leave the job to another worker, which may reach its decode worker; drop it after several."""
        _logger.warning("could not get the lease on a prefill job: %r", error)
        if item.num_deliveries < MAX_DELIVERIES:
            await self._give_back(item, after_s=PAUSE_S)
        else:
            await item.acknowledge()
            self._counters.dropped.inc()

    async def _request_lease(self, item: work_queue.WorkItem) -> bool:
        job = _decode_job(item.body)
        lease = shared_queue.LeaseRequest(
            number=job.number, instance_id=self._instance_id, num_deliveries=item.num_deliveries
        )
        return await requests.call(
            self._plane,
            job.transport[self._plane.name],
            job.endpoint,
            lease,
            reply_type=bool,
            timeout_s=LEASE_S,
        )

    async def _keep_item(self, item: work_queue.WorkItem) -> None:
        while True:
            await self._clock.sleep(shared_queue.BOUNDS.acknowledge_s / 3)
            try:
                await item.keep()
            except errors.Unavailable as error:
                _logger.debug("could not keep a prefill job: %s", error)
