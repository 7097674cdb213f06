"""The prefill worker's end of a queue of tickets: take one, claim its prompt, and hear when that is over.

The prompt itself then comes as any other request does, from the decode worker whose it is (`ticket_queue`). A ticket is
acknowledged when the decode worker says that it is over: it knows where the blocks are, or does not want them any more.
From then on they are held for a time that `protocols.kv_transfer` bounds; to hold the ticket until they are
copied as well would have a prompt computed twice that its decode worker will answer in any case.

A worker takes only what it is about to begin. While it computes, it tells the queue so. Told to leave it takes nothing
more, and what comes after that it gives back.
"""

import asyncio
import logging

import msgspec

from dynamo.base import errors, tasks
from dynamo.disagg import metrics, ticket_queue, tickets
from dynamo.runtime import requests, work_queue

AT_ONCE = 2  # one is computed; the next is there when it ends
PULL_S = 1.0  # for so long a worker that leaves may wait for a ticket to give back
AGAIN_S = 0.5  # after a queue that did not answer
PAUSE_S = 0.2  # after a claim that was refused, or not heard
CLAIM_S = 600.0  # the decode worker's own limit ends it long before
CLOSE_S = 2 * PULL_S
MAX_UNHEARD = 3  # deliveries of a ticket whose decode worker cannot be reached
_logger = logging.getLogger(__name__)
_decode = msgspec.msgpack.Decoder(tickets.Ticket).decode


class TicketTaker:
    """`start` begins to take, `leave` stops taking, `close` ends it."""

    def __init__(
        self,
        join: ticket_queue.Join,
        plane: requests.RequestPlane,
        instance_id: int,
        counts: metrics.TakerMetrics,
    ) -> None:
        self._join = join
        self._plane = plane
        self._instance_id = instance_id
        self._counts = counts
        self._is_leaving = False
        self._taking: list[asyncio.Task[None]] = []
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Raises ConfigError if there is no server for the queue."""
        queues = [await ticket_queue.join_first(self._join) for _ in range(AT_ONCE)]
        self._taking = [
            self._tasks.start("take prefill tickets", self._take(queue)) for queue in queues
        ]

    async def leave(self) -> None:
        """Take nothing more; what was claimed goes on."""
        self._is_leaving = True

    async def close(self) -> None:
        """Say of what is over that it is, and end."""
        self._is_leaving = True
        if self._taking:
            await asyncio.wait(self._taking, timeout=CLOSE_S)
        await self._tasks.close()

    async def _take(self, queue: work_queue.WorkQueue) -> None:
        while not self._is_leaving:
            try:
                item = await queue.pull(PULL_S)
                if item is not None:
                    await self._handle(item)
            except errors.Unavailable as error:
                _logger.warning("the prefill queue: %s", error)
                await asyncio.sleep(AGAIN_S)
                queue = await self._joined_anew(queue)
        await queue.close()

    async def _joined_anew(self, queue: work_queue.WorkQueue) -> work_queue.WorkQueue:
        """A server that lost its data does not know the queue any more."""
        try:
            joined = await self._join()
        except (errors.ConfigError, errors.Unavailable) as error:
            _logger.debug("could not join the prefill queue again: %s", error)
            return queue
        await queue.close()
        return joined

    async def _handle(self, item: work_queue.WorkItem) -> None:
        """Raises Unavailable."""
        if self._is_leaving:
            await self._give_back(item)
            return
        keeping = self._tasks.start("keep a prefill ticket", _keep(item))
        try:
            is_over = await self._claim(item)
        except (errors.DynamoError, msgspec.DecodeError, KeyError) as error:
            await self._not_heard(item, error)
            return
        finally:
            keeping.cancel()
        if is_over:
            await item.acknowledge()
            self._counts.done.inc()
        else:
            await self._give_back(item)
            await asyncio.sleep(PAUSE_S)  # let others have it, who are not refused

    async def _give_back(self, item: work_queue.WorkItem, *, after_s: float = 0.0) -> None:
        await item.give_back(after_s=after_s)
        self._counts.given_back.inc()

    async def _not_heard(self, item: work_queue.WorkItem, error: Exception) -> None:
        """Another may reach whose prompt it is; if several could not, it is gone."""
        _logger.warning("could not claim the prompt of a prefill ticket: %r", error)
        if item.num_deliveries < MAX_UNHEARD:
            await self._give_back(item, after_s=PAUSE_S)
        else:
            await item.acknowledge()
            self._counts.dropped.inc()

    async def _claim(self, item: work_queue.WorkItem) -> bool:
        ticket = _decode(item.body)
        claim = tickets.Claim(
            number=ticket.number, instance_id=self._instance_id, num_deliveries=item.num_deliveries
        )
        return await requests.ask(
            self._plane,
            ticket.transport[self._plane.name],
            ticket.endpoint,
            claim,
            reply_type=bool,
            timeout_s=CLAIM_S,
        )


async def _keep(item: work_queue.WorkItem) -> None:
    while True:
        await asyncio.sleep(tickets.BOUNDS.acknowledge_s / 3)
        try:
            await item.keep()
        except errors.Unavailable as error:
            _logger.debug("could not keep a prefill ticket: %s", error)
