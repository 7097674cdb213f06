"""A prefill queue that all prefill workers of a model share: a worker with time takes the oldest job.

    decode worker    push a prefill job ─▶ work queue
    prefill worker   pull it; ask for a lease on it, at the address in the job ─▶
    decode worker    send that worker the prompt as `DirectQueue` does; the stream says how it goes, and ends with us
    decode worker    reply to the lease request: over ─▶ the job is acknowledged; or failed ─▶ another worker gets it
    prefill dies     its stream breaks; it does not acknowledge, so the job is delivered to another worker

So there is one way to compute a prompt remotely, and the queue only decides on the worker. A job stands for a prompt;
the prompt itself stays with the decode worker until then, so nothing that a user wrote lies on a server's disk, and
no prompt is too long. The job of a prompt that is no longer needed is acknowledged by the first worker that asks for
its lease. A worker to which our engine is not connected gets no lease.

A job is acknowledged when the decode worker says that it is over: it knows where the blocks are, or does not need them
any more. From then on the blocks are kept for a time that `protocols.kv_transfer` bounds; to keep the job until they
are copied as well would compute prompts twice that their decode worker answers in any case. A prefill worker takes only
what it is about to compute, and extends its hold on the job meanwhile. A draining one takes nothing more, and gives
back the jobs that still arrive.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors, ids, tasks
from dynamo.disagg import metrics, prefill_queue
from dynamo.observability import logs
from dynamo.protocols import generate, instances, kv_transfer, wire
from dynamo.runtime import client, requests, services

# beside a decode worker's own endpoint; leases are requested here
LEASE_ENDPOINT = "prefill_claims"
TAKES_JOBS = "takes_prefill_tickets"  # in a prefill worker's runtime data
BOUNDS = services.WorkQueueBounds(
    max_items=10_000,
    max_bytes=16 * 2**20,
    max_item_bytes=2048,
    acknowledge_s=3.0,  # by so much a worker's death delays its prompts, at most
)
PUSH_S = 1.0  # after that the prompt is computed locally instead
COUNT_S = 0.1  # between two counts of the waiting jobs
_STALE_S = 10 * COUNT_S
NUM_JOBS = 2  # at once: one is computed, the next is there when it ends
PULL_S = 1.0  # for so long a draining worker may wait for a job that it gives back
REJOIN_S = 0.5  # pause after a queue that did not answer
PAUSE_S = 0.2  # pause after a refused lease, or an unreachable decode worker
LEASE_S = 600.0  # the decode worker's own time limit ends it long before
CLOSE_S = 2 * PULL_S
MAX_DELIVERIES = 3  # of a job, of which the decode worker cannot be reached
_NO_WORKER = "there is no prefill worker that takes the prompt from the queue"
_logger = logging.getLogger(__name__)
JoinQueue = Callable[[], Awaitable[services.WorkQueue]]


class PrefillJob(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that waits. `transport` maps a request plane's name to the address where its lease is requested."""

    number: str
    endpoint: str  # its path there
    transport: dict[str, str]


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by a prefill worker that has taken a job and is ready to compute. The reply is one boolean, and comes late:
    true once there is nothing more to do for the prompt, false if another worker should take the job.
    """

    number: str
    instance_id: int
    num_deliveries: int


_decode_job = msgspec.msgpack.Decoder(PrefillJob).decode
_decode_lease = msgspec.msgpack.Decoder(LeaseRequest).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class _JobLease:
    """A worker that is to compute a prompt, and waits for the reply to its lease request."""

    call: requests.Call
    instance_id: int

    def reply(self, *, is_over: bool) -> None:
        """End the lease. Only the first reply counts."""
        self.call.reply(is_over)
        self.call.finish()


@dataclass(slots=True)
class _Prompt:
    """A prompt that waits for a lease, or is being computed by the last of the workers `tried`."""

    lease: "asyncio.Future[_JobLease | str]"  # or why there will be none
    tried: list[int] = field(default_factory=list)


class SharedQueue:
    """A `PrefillQueue`: a decode worker's side, and a lifecycle hook of its host."""

    def __init__(
        self,
        join: JoinQueue,
        workers: Callable[[], Sequence[int]],
        prefill_client: client.EndpointClient,
        plane: requests.RequestPlane,
        endpoint: str,
        counters: metrics.DisaggMetrics,
        clock: clocks.Clock,
    ) -> None:
        """`workers` returns the ids of connected prefill workers; leases are requested at `endpoint` of `plane`."""
        self._join = join
        self._workers = workers
        self._client = prefill_client
        self._plane = plane
        self._endpoint = endpoint
        self._counters = counters
        self._clock = clock
        self._hung = prefill_queue.probed_workers(prefill_client, clock)
        self._work: services.WorkQueue | None = None  # while it can be used
        self._joined: services.WorkQueue | None = None  # the same, until it is closed
        self._transport: dict[str, str] = {}
        self._prompts: dict[str, _Prompt] = {}  # by job number
        epoch = ids.new_instance_id()
        self._numbers = (f"{epoch:x}.{i}" for i in itertools.count())
        self._num_waiting, self._counted_at = 0, float("-inf")  # of all decode workers
        self._is_reachable = True
        self._count_requested = asyncio.Event()
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Join the queue and serve leases. Raises ConfigError if there is no server for the queue."""
        work = await join_at_start(self._join)
        address = await self._plane.serve(self._endpoint, self._handle_lease_request)
        self._transport = {self._plane.name: address}
        self._work = self._joined = work
        self._client.on_change(self._fail_stranded_prompts)
        self._tasks.start("count prompts in the prefill queue", self._count_waiting(work))

    async def leave(self) -> None:
        """Push no more jobs, and fail those that wait, so that they are computed locally."""
        self._work = None
        for prompt in self._waiting_prompts():
            prompt.lease.set_result("this worker stops, and takes its prompts home")

    async def close(self) -> None:
        """End all tasks and leave the queue. The workers that take the jobs left there acknowledge them."""
        self._work = None
        await self._hung.close()
        await self._tasks.close()
        joined, self._joined = self._joined, None
        if joined is not None:
            await joined.close()

    @property
    def size(self) -> int | None:
        """Our prompts without a lease; or what all decode workers had waiting a moment ago, if that is more."""
        self._count_requested.set()
        if self._work is None or not self._is_reachable or not self._usable():
            return None
        num_ours = len(self._waiting_prompts())
        is_stale = self._counted_at < self._clock.now() - _STALE_S
        return num_ours if is_stale else max(num_ours, self._num_waiting)

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Push a job, and send the prompt to the worker that gets its lease. See `PrefillQueue.prefill`."""
        number = next(self._numbers)
        prompt = self._prompts[number] = _Prompt(_new_future())
        try:
            async with self._clock.timeout(timeout_s):
                await self._push_job(number)
                return await self._prefill_by_lease(prompt, request, timeout_s)
        except (TimeoutError, errors.DeadlineExceeded):
            if prompt.lease.done() and prompt.tried:
                self._hung.report(prompt.tried[-1], request)
            raise prefill_queue.timeout_error(timeout_s) from None
        finally:
            del self._prompts[number]
            lease = prompt.lease.result() if prompt.lease.done() else None
            if isinstance(lease, _JobLease):
                lease.reply(is_over=True)

    def _usable(self, tried: Sequence[int] = ()) -> Sequence[int]:
        return self._client.usable(self._hung.without(self._workers()), tried)

    def _fail_stranded_prompts(self) -> None:
        """End the waiting of prompts that no worker can compute any more."""
        for prompt in self._waiting_prompts():
            if not self._usable(prompt.tried):
                prompt.lease.set_result(_NO_WORKER)

    def _waiting_prompts(self) -> list[_Prompt]:
        return [prompt for prompt in self._prompts.values() if not prompt.lease.done()]

    async def _push_job(self, number: str) -> None:
        if self._work is None:
            raise errors.Unavailable("the prefill queue is closed")
        if not self._usable():
            raise errors.NoWorkers(_NO_WORKER)
        job = PrefillJob(number=number, endpoint=self._endpoint, transport=self._transport)
        try:
            async with self._clock.timeout(PUSH_S):
                await self._work.push(_encode(job))
        except TimeoutError:
            self._is_reachable = False
            raise errors.Unavailable(
                f"the prefill queue took no prompt within {PUSH_S:g} s"
            ) from None

    async def _prefill_by_lease(
        self, prompt: _Prompt, request: generate.Request, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """Send the prompt to each worker that gets a lease, until one succeeds or there is no other."""
        deaths = prefill_queue.PrefillDeaths(request)
        while True:
            # shielded: the end of the time, or of the caller, would cancel the future, which then has no result
            lease = await asyncio.shield(prompt.lease)
            if isinstance(lease, str):
                raise errors.NoWorkers(lease)
            prompt.tried.append(lease.instance_id)
            try:
                return await prefill_queue.request_prefill(
                    self._client,
                    lease.instance_id,
                    request,
                    timeout_s=timeout_s,
                    headers=logs.current_headers(),
                )
            except prefill_queue.RETRIABLE as error:
                self._hung.report_loss(lease.instance_id, request, error)
                deaths.record(error)
                if not self._usable(prompt.tried):
                    raise
            self._counters.retries.inc()
            prompt.lease = _new_future()
            lease.reply(is_over=False)

    def _handle_lease_request(self, call: requests.Call) -> None:
        try:
            request = _decode_lease(call.body)
        except wire.DECODE_ERRORS as error:
            call.fail(errors.RemoteProtocolError(f"expected a lease request: {error}"))
            return
        prompt = self._prompts.get(request.number)
        lease = _JobLease(call, request.instance_id)
        if prompt is None:
            lease.reply(is_over=True)
            return
        if prompt.lease.done() or request.instance_id not in self._usable(prompt.tried):
            lease.reply(is_over=False)
        else:
            prompt.lease.set_result(lease)
            if request.num_deliveries > 1:
                self._counters.redelivered.inc()

    async def _count_waiting(self, work: services.WorkQueue) -> None:
        """Count the waiting jobs of all decode workers, as long as `size` is read."""
        while True:
            await self._count_requested.wait()
            self._count_requested.clear()
            try:
                self._num_waiting = await work.num_waiting()
            except errors.Unavailable as error:
                if self._is_reachable:
                    _logger.warning("prompts are computed here meanwhile: %s", error)
                self._is_reachable = False
            else:
                self._is_reachable = True
                self._counted_at = self._clock.now()
            await self._clock.sleep(COUNT_S)


class PrefillJobConsumer:
    """A lifecycle hook of a prefill worker's host."""

    def __init__(
        self,
        join: JoinQueue,
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
        queues = [await join_at_start(self._join) for _ in range(NUM_JOBS)]
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

    async def _consume(self, queue: services.WorkQueue) -> None:
        try:
            while not self._is_leaving:
                try:
                    item = await queue.pull(PULL_S)
                    if item is not None:
                        await self._handle_job(item)
                except errors.Unavailable as error:
                    _logger.warning("the prefill queue: %s", error)
                    await self._clock.sleep(REJOIN_S)
                    queue = await self._rejoin(queue)
        finally:  # also if it is cancelled, because its job outlives the time of `close`
            await queue.close()

    async def _rejoin(self, queue: services.WorkQueue) -> services.WorkQueue:
        """Join again: a server that lost its data does not know the queue any more."""
        try:
            joined = await self._join()
        except (errors.ConfigError, errors.Unavailable) as error:
            _logger.debug("could not join the prefill queue again: %s", error)
            return queue
        await queue.close()
        return joined

    async def _handle_job(self, item: services.WorkItem) -> None:
        """Work on one job until its lease is over. Raises Unavailable if the queue is lost."""
        if self._is_leaving:
            await self._give_back(item)
            return
        extending = self._tasks.start("keep a prefill job", self._keep_item(item))
        try:
            is_over = await self._request_lease(item)
        except (errors.DynamoError, *wire.DECODE_ERRORS, KeyError) as error:
            await self._handle_unreachable(item, error)
            return
        finally:
            extending.cancel()
        if is_over:
            await item.acknowledge()
            self._counters.done.inc()
        else:
            await self._give_back(item)
            # so that other workers, which may get the lease, take it
            await self._clock.sleep(PAUSE_S)

    async def _give_back(self, item: services.WorkItem, *, after_s: float = 0.0) -> None:
        await item.give_back(after_s=after_s)
        self._counters.given_back.inc()

    async def _handle_unreachable(self, item: services.WorkItem, error: Exception) -> None:
        """Leave the job to another worker, which may reach its decode worker; drop it after several."""
        _logger.warning("could not get the lease on a prefill job: %r", error)
        if item.num_deliveries < MAX_DELIVERIES:
            await self._give_back(item, after_s=PAUSE_S)
        else:
            await item.acknowledge()
            self._counters.dropped.inc()

    async def _request_lease(self, item: services.WorkItem) -> bool:
        job = _decode_job(item.body)
        lease = LeaseRequest(
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

    async def _keep_item(self, item: services.WorkItem) -> None:
        while True:
            await self._clock.sleep(BOUNDS.acknowledge_s / 3)
            try:
                await item.keep()
            except errors.Unavailable as error:
                _logger.debug("could not keep a prefill job: %s", error)


def queue_name(endpoint: instances.EndpointName, model: str, checksums: Mapping[str, str]) -> str:
    """Return the name of a model's queue; models of one name with other files have queues of their own."""
    identity = msgspec.json.encode((endpoint.path, model, sorted(checksums.items())))
    return f"prefill {endpoint.path} {hashlib.sha256(identity).hexdigest()[:16]}"


async def join_at_start(join: JoinQueue) -> services.WorkQueue:
    """Join when a worker starts. Raises ConfigError: a queue that does not answer is a mistake in the settings then."""
    try:
        return await join()
    except errors.Unavailable as error:
        raise errors.ConfigError(
            f"cannot join the prefill queue: {error}; to run without it: --prefill-queue direct"
        ) from error


def _new_future() -> "asyncio.Future[_JobLease | str]":
    return asyncio.get_running_loop().create_future()
