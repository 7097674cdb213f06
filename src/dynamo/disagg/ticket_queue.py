"""A prefill queue that all prefill workers of a model share: whoever has time takes the oldest prompt.

    here          push a ticket ─▶ work queue
    prefill       pull it; claim it here, at the address on it ─▶
    here          ask that worker as `DirectQueue` does; its stream tells how it goes, and ends with us
    here          reply to the claim: it is over ─▶ the ticket is acknowledged; or it failed ─▶ another has it
    prefill dies  its stream breaks; nobody acknowledges, so the ticket comes to another, who claims it

So there is one way to compute a prompt elsewhere, and the queue only says by whom. A prompt that nobody waits for
any more has no number here: its ticket is thrown away by the first who claims it. One that a worker claims whose
blocks our engine could not read is kept for another.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo.base import errors, ids, tasks
from dynamo.disagg import metrics, prefill_queue, tickets
from dynamo.protocols import generate, kv_transfer
from dynamo.runtime import client, requests, work_queue

PUSH_S = 1.0  # a queue that takes longer helps nobody
COUNT_S = 0.1  # between two looks at what waits there
_STALE_S = 10 * COUNT_S
_NOBODY = "there is no prefill worker that takes the prompt from the queue"
_logger = logging.getLogger(__name__)
_decode_claim = msgspec.msgpack.Decoder(tickets.Claim).decode
_encode = msgspec.msgpack.Encoder().encode
Join = Callable[[], Awaitable[work_queue.WorkQueue]]


@dataclass(frozen=True, slots=True)
class _Claimed:
    """Who is to compute a prompt, and waits to hear that it is over."""

    call: requests.Call
    instance_id: int

    def reply(self, *, is_over: bool) -> None:
        """What comes after the first one is not heard."""
        self.call.reply(is_over)
        self.call.finish()


@dataclass(slots=True)
class _Prompt:
    """One that waits for a claim, or is being computed by the last of those who `tried`."""

    claimed: "asyncio.Future[_Claimed | str]"  # or why nobody will
    tried: list[int] = field(default_factory=list)


class TicketQueue:
    """One decode worker's side. `start` joins, `leave` takes what waits back, `close` ends it."""

    def __init__(
        self,
        join: Join,
        workers: Callable[[], Sequence[int]],
        asked: client.EndpointClient,
        plane: requests.RequestPlane,
        endpoint: str,
        counts: metrics.DisaggMetrics,
    ) -> None:
        """`workers` are those that can be asked now; claims are taken at `endpoint` of our `plane`."""
        self._join = join
        self._workers = workers
        self._client = asked
        self._plane = plane
        self._endpoint = endpoint
        self._counts = counts
        self._work: work_queue.WorkQueue | None = None  # while it can be used
        self._ticket: Callable[[str], tickets.Ticket]
        self._prompts: dict[str, _Prompt] = {}
        epoch = ids.new_instance_id()
        self._numbers = (f"{epoch:x}.{i}" for i in itertools.count())
        self._counted, self._counted_at = 0, float("-inf")
        self._is_reachable = True
        self._is_looked_at = asyncio.Event()
        self._tasks = tasks.Tasks()

    async def start(self) -> None:
        """Raises ConfigError if there is no server for the queue."""
        work = await join_first(self._join)
        address = await self._plane.serve(self._endpoint, self._hear_claim)
        transport = {self._plane.name: address}
        self._ticket = lambda number: tickets.Ticket(
            number=number, endpoint=self._endpoint, transport=transport
        )
        self._work = work
        self._client.on_change(self._workers_changed)
        self._tasks.start("count prompts in the prefill queue", self._count(work))

    async def leave(self) -> None:
        """Nothing more goes there, and what waits there is computed here."""
        self._work = None
        for prompt in self._waiting():
            prompt.claimed.set_result("this worker stops, and takes its prompts home")

    async def close(self) -> None:
        """Tickets that are still there are thrown away by whoever takes them."""
        self._work = None
        await self._tasks.close()

    @property
    def size(self) -> int | None:
        """Ours that nobody has claimed; or what all decode workers had waiting a moment ago, if that is more."""
        self._is_looked_at.set()
        if self._work is None or not self._is_reachable:
            return None
        if not self._can_be_computed():
            return None
        num_ours = len(self._waiting())
        is_stale = self._counted_at < asyncio.get_running_loop().time() - _STALE_S
        return num_ours if is_stale else max(num_ours, self._counted)

    async def prefill(
        self, request: generate.Request, *, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """See `prefill_queue.PrefillQueue`."""
        number = next(self._numbers)
        prompt = self._prompts[number] = _Prompt(_future())
        try:
            async with asyncio.timeout(timeout_s):
                await self._push(number)
                return await self._have_computed(prompt, request, timeout_s)
        except TimeoutError:
            raise prefill_queue.late(timeout_s) from None
        finally:
            del self._prompts[number]
            claimed = prompt.claimed.result() if prompt.claimed.done() else None
            if isinstance(claimed, _Claimed):
                claimed.reply(is_over=True)

    def _can_be_computed(self) -> bool:
        return bool(self._client.usable(self._workers()))

    def _workers_changed(self) -> None:
        for prompt in self._waiting():
            if not self._client.usable(self._workers(), prompt.tried):
                prompt.claimed.set_result(_NOBODY)

    def _waiting(self) -> list[_Prompt]:
        return [prompt for prompt in self._prompts.values() if not prompt.claimed.done()]

    async def _push(self, number: str) -> None:
        if self._work is None:
            raise errors.Unavailable("the prefill queue is closed")
        if not self._can_be_computed():
            raise errors.NoWorkers(_NOBODY)
        try:
            async with asyncio.timeout(PUSH_S):
                await self._work.push(_encode(self._ticket(number)))
        except TimeoutError:
            self._is_reachable = False
            raise errors.Unavailable(
                f"the prefill queue took no prompt within {PUSH_S:g} s"
            ) from None

    async def _have_computed(
        self, prompt: _Prompt, request: generate.Request, timeout_s: float
    ) -> kv_transfer.KvTransferParams:
        """By whoever claims it; raises what the last of them failed with, if there is nobody else."""
        while True:
            claimed = await prompt.claimed
            if isinstance(claimed, str):
                raise errors.NoWorkers(claimed)
            prompt.tried.append(claimed.instance_id)
            try:
                return await prefill_queue.ask(
                    self._client, claimed.instance_id, request, timeout_s=timeout_s
                )
            except prefill_queue.ANOTHER_MAY:
                if not self._client.usable(self._workers(), prompt.tried):
                    raise
            self._counts.retries.inc()
            prompt.claimed = _future()
            claimed.reply(is_over=False)

    def _hear_claim(self, call: requests.Call) -> None:
        try:
            claim = _decode_claim(call.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            call.fail(errors.RemoteProtocolError(f"expected a claim: {error}"))
            return
        prompt = self._prompts.get(claim.number)
        claimed = _Claimed(call, claim.instance_id)
        if prompt is None:
            claimed.reply(is_over=True)
        elif prompt.claimed.done() or not self._may_compute(claim.instance_id, prompt):
            claimed.reply(is_over=False)
        else:
            prompt.claimed.set_result(claimed)
            if claim.num_deliveries > 1:
                self._counts.redelivered.inc()

    def _may_compute(self, instance_id: int, prompt: _Prompt) -> bool:
        usable = self._client.usable(self._workers(), prompt.tried)
        return instance_id in usable

    async def _count(self, work: work_queue.WorkQueue) -> None:
        """While somebody wants to know."""
        while True:
            await self._is_looked_at.wait()
            self._is_looked_at.clear()
            try:
                self._counted = await work.num_waiting()
            except errors.Unavailable as error:
                if self._is_reachable:
                    _logger.warning("prompts are computed here meanwhile: %s", error)
                self._is_reachable = False
            else:
                self._is_reachable = True
                self._counted_at = asyncio.get_running_loop().time()
            await asyncio.sleep(COUNT_S)


async def join_first(join: Join) -> work_queue.WorkQueue:
    """When a worker starts, a queue that does not answer is a mistake in its settings. Raises ConfigError."""
    try:
        return await join()
    except errors.Unavailable as error:
        raise errors.ConfigError(
            f"cannot join the prefill queue: {error}; to run without it: --prefill-queue direct"
        ) from error


def _future() -> "asyncio.Future[_Claimed | str]":
    return asyncio.get_running_loop().create_future()
