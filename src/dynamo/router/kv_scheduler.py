"""The KV scheduler of one model at one endpoint: it selects the worker of each request, and counts those in flight.

It hashes the prompt's blocks, asks the decider (`selection`), lets a request wait until a worker has room, and tells
a listener what changes. `kv_router` sends the requests; a caller of the standalone router sends its own.
"""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Container, Mapping, Sequence

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.protocols import load as load_events
from dynamo.router import api, metrics, route, selection
from dynamo.router.api import Decision, Prompt
from dynamo.router.worker_load import Capacity


class SessionAffinity:
    """Session id → the worker of the session's last request, for `ttl_s` seconds after that request.

    Bounded: beyond `max_sessions` the sessions used longest ago are forgotten.
    """

    def __init__(self, ttl_s: float, *, max_sessions: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._worker_by_session: OrderedDict[str, tuple[api.Worker, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_by_session)

    def find_worker(
        self, session_id: str, live_workers: Container[api.Worker], now: float
    ) -> api.Worker | None:
        """Return the session's worker; None if it has none, has expired or its worker is not live."""
        worker, expires_at = self._worker_by_session.get(session_id, (None, 0.0))
        if worker is None or expires_at <= now or worker not in live_workers:
            return None
        return worker

    def assign_worker(self, session_id: str, worker: api.Worker, now: float) -> None:
        """Record that a request of the session was sent to `worker`; this renews the time to live."""
        self._worker_by_session[session_id] = worker, now + self._ttl_s
        self._worker_by_session.move_to_end(session_id)
        if len(self._worker_by_session) > self._max_sessions:
            self._worker_by_session.popitem(last=False)


class SequenceListener:
    """What is called whenever this router's active sequences change; this one ignores all calls."""

    def add_sequence(self, key: str, decision: Decision, prompt: Prompt) -> None:
        """Note that a request was assigned to a worker."""

    def mark_prefill_completed(self, key: str) -> None:
        """Note that the prompt of a request is computed."""

    def free_sequence(self, key: str) -> None:
        """Note that a request has ended."""

    def refresh_peers(self) -> None:
        """Fetch what other routers have sent to workers that are new to this one."""


class KvScheduler:
    """Selects workers by cached prefixes and by the load of the requests in flight. One event loop owns it."""

    def __init__(
        self,
        selector: selection.Selector,
        *,
        block_size: int,
        counts: metrics.RouteMetrics,
        clock: clocks.Clock,
        queue_timeout_s: float,
        worker_type: str = "decode",
        sessions: SessionAffinity | None = None,
        listener: SequenceListener | None = None,
    ) -> None:
        self.selector = selector
        self.block_size = block_size
        self._counts = counts
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        # as Dynamo's metrics have it: those that answer, or "prefill"
        self._worker_type = worker_type
        self._sessions = sessions
        self._listener = listener or SequenceListener()
        self._waiting: dict[str, asyncio.Future[Decision]] = {}

    def set_workers(self, workers: Mapping[api.Worker, Capacity]) -> None:
        """Replace the set of workers, and admit queued requests that now have room."""
        earlier_workers = set(self.selector.active.loads)
        self.selector.set_workers(workers)
        removed = earlier_workers - workers.keys()
        self._counts.show_workers(self._worker_type, self.selector.active.loads, removed)
        if workers.keys() - earlier_workers:
            self._listener.refresh_peers()
        self._admit_queued()

    def start_request(self, prompt_len: int) -> str:
        """Count a new request; return the key that it has here: callers choose `request.id`, and may use one twice."""
        number = self._counts.count_start(prompt_len)
        return f"{self._counts.router_id}-{number}"

    def make_prompt(
        self,
        request: generate.Request,
        instance_id: int | None,
        usable: Sequence[int],
        *,
        is_restricted: bool = False,
    ) -> Prompt:
        """Hash the prompt's blocks, and pin it to the instance that its caller names, or to its session's worker.

        `is_restricted`: no instance but those that its caller allows can ever serve it.
        """
        began_at = self._clock.now()
        local_hashes = blocks.local_hashes(request.hashed_ids, self.block_size, request.hash_seed)
        locally_hashed_at = self._clock.now()
        sequence_hashes = blocks.sequence_hashes(local_hashes)
        self._counts.observe_hashing(
            locally_hashed_at - began_at, self._clock.now() - locally_hashed_at
        )
        prompt = Prompt(
            num_tokens=request.prompt_len,
            block_size=self.block_size,
            sequence_hashes=sequence_hashes,
            priority=request.priority,
            is_restricted=is_restricted or request.lora_name is not None,
            dp_rank=request.data_parallel_rank,
            is_prefilled=kv_transfer.is_prefilled(request.kv_transfer_params),
        )
        pinned = self._find_pinned(request, prompt, instance_id, usable)
        return prompt if pinned is None else dataclasses.replace(prompt, pinned=pinned)

    def _find_pinned(
        self,
        request: generate.Request,
        prompt: Prompt,
        instance_id: int | None,
        usable: Sequence[int],
    ) -> api.Worker | None:
        """Return the only worker that a request may go to, None if the policy may choose."""
        workers, rank = self.selector.active.loads, request.data_parallel_rank
        if instance_id is not None:
            num_ranks = sum(worker.instance_id == instance_id for worker in workers)
            if rank is None and num_ranks > 1:
                return self.selector.choose_rank(prompt, instance_id, self._clock.now())
            return api.Worker(instance_id, rank or 0)
        if self._sessions is None or request.session_id is None:
            return None
        live_ids = frozenset(usable)
        live_workers = [
            worker
            for worker in workers
            if worker.instance_id in live_ids and rank in (None, worker.dp_rank)
        ]
        return self._sessions.find_worker(request.session_id, live_workers, self._clock.now())

    async def select(
        self, key: str, prompt: Prompt, add_callback: route.AddDisconnectCallback | None
    ) -> Decision:
        """Select a worker at once, or wait in the queue until one has room.

        The request counts as in flight until `free_request`. Raises NoWorkers, Overloaded, Cancelled.
        """
        self._counts.begin_decision()
        began_at = self._clock.now()
        decision = self.selector.select(key, prompt, self._clock.now())
        self._counts.observe_decision(self._clock.now() - began_at)
        if decision is None:
            decision = await self._wait_in_queue(key, prompt, add_callback)
            if prompt.is_restricted and not prompt.allows(decision.worker):
                self.free_request(key)
                raise errors.NoWorkers("the last worker that could serve it was lost in the wait")
        if decision.worker in self.selector.active.loads:  # else it was lost in the wait
            self._counts.count_request(decision.worker, prompt, decision.overlap_blocks)
        self._listener.add_sequence(key, decision, prompt)
        return decision

    def select_worker(
        self,
        packed_tokens: bytes,
        key: str | None,
        seed: int,
        allowed_instances: frozenset[int] | None,
        override: api.PolicyOverride | None = None,
    ) -> Decision:
        """Select a worker for a prompt that the caller sends itself (`blocks.pack`ed tokens; seed: `blocks.seed_of`).

        With a `key`, the request counts as in flight until `free_request(key)`, and of several questions with that key
        at the worker of the last. Raises NoWorkers or Overloaded.
        """
        prompt = dataclasses.replace(
            Prompt.from_tokens(packed_tokens, self.block_size, seed),
            allowed_instances=allowed_instances,
            override=override,
        )
        if key is None:
            return self.preview(prompt)
        self.free_request(key)
        decision = self.selector.select(key, prompt, self._clock.now())
        if decision is None:
            self.selector.free(key, self._clock.now())
            raise errors.Overloaded("all workers are busy: try again later")
        self._listener.add_sequence(key, decision, prompt)
        return decision

    def preview(self, prompt: Prompt) -> Decision:
        """Return the decision without a queue and without counting the request. Raises NoWorkers."""
        return self.selector.preview(prompt, self._clock.now())

    def assign_session(self, session_id: str | None, worker: api.Worker) -> None:
        """Record that a worker has accepted a request of a session."""
        if self._sessions is not None and session_id is not None:
            self._sessions.assign_worker(session_id, worker, self._clock.now())

    def mark_prefill_completed(self, key: str) -> None:
        """Record that the prompt of this request is computed, and admit queued requests that now have room."""
        self.selector.mark_prefill_completed(key, self._clock.now())
        self._listener.mark_prefill_completed(key)
        self._admit_queued()

    def record_first_output(
        self, key: str, prompt: Prompt, cached_tokens: int | None, sent_at: float
    ) -> None:
        """Record the first output of a request, and how many tokens the worker found in its cache, if it says so."""
        self.mark_prefill_completed(key)
        self._counts.count_cached_tokens(prompt, cached_tokens)
        self._counts.observe_first_output(self._clock.now() - sent_at)

    def free_request(self, key: str) -> None:
        """Forget an ended request, and admit queued requests that now have room. Idempotent."""
        self.selector.free(key, self._clock.now())
        self._listener.free_sequence(key)
        self._admit_queued()

    def apply_peer_change(self, event: load_events.ActiveSequenceEvent) -> None:
        """Apply a change of another router, and admit queued requests that now have room."""
        self.selector.active.apply(event, self._clock.now())
        if not isinstance(event.data, load_events.AddRequest):  # which takes room
            self._admit_queued()

    def min_active_requests(self, usable: Collection[int]) -> int | None:
        """Return the number of requests in flight at the least busy of these instances; None if there are none."""
        loads = self.selector.active.loads.items()
        return min(
            (load.num_requests for worker, load in loads if worker.instance_id in usable),
            default=None,
        )

    def estimate_load(self, prompt: Prompt) -> api.LoadEstimate:
        """Estimate what a request would meet at the worker that it would be sent to. Raises NoWorkers."""
        decision = self.preview(prompt)
        load = self.selector.active.loads[decision.worker]
        num_ahead = load.backlog(self._clock.now())
        num_cached = min(prompt.num_tokens, int(decision.overlap_blocks * self.block_size))
        return api.LoadEstimate(
            num_new=prompt.num_tokens - num_cached,
            block_size=self.block_size,
            num_ahead=num_ahead,
            num_steps_ahead=num_ahead / load.capacity.max_num_batched_tokens,
            num_requests=load.num_requests,
            share_in_use=load.share_in_use(len(prompt.sequence_hashes)),
            tokens_per_s=load.prefill_speed.tokens_per_s,
        )

    async def _wait_in_queue(
        self, key: str, prompt: Prompt, add_callback: route.AddDisconnectCallback | None
    ) -> Decision:
        admission: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = admission
        if add_callback is not None:
            add_callback(lambda: _cancel_wait(admission))
        self._counts.enter_queue(prompt.num_tokens)
        began_at = self._clock.now()
        try:
            self._admit_queued()
            async with self._clock.timeout(self._queue_timeout_s):
                return await admission
        except TimeoutError:
            self.free_request(key)
            self._counts.count_queue_timeout()
            raise errors.Overloaded(
                f"all workers have been busy for {self._queue_timeout_s:g} s: try again later",
                retry_after_s=self._queue_timeout_s,
            ) from None
        except (asyncio.CancelledError, errors.Cancelled):
            self.free_request(key)
            raise
        finally:
            del self._waiting[key]
            self._counts.leave_queue(prompt.num_tokens, self._clock.now() - began_at)

    def _admit_queued(self) -> None:
        """Send the queued requests for which a worker has room now."""
        if not self.selector.num_waiting:
            return
        for key, decision in self.selector.admit(self._clock.now()):
            admission = self._waiting.get(key)
            if admission is not None and not admission.done():
                admission.set_result(decision)
            else:  # its wait ended in this same turn of the event loop
                self.selector.free(key, self._clock.now())


def _cancel_wait(admission: asyncio.Future[Decision]) -> None:
    if not admission.done():
        admission.set_exception(errors.Cancelled("the caller went away"))
