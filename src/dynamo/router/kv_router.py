"""The KV router of one model at one endpoint: it asks the deciders which worker gets a request, and updates them.

`KvRouter.open_stream` is the path of a request: hash the prompt's blocks, select a worker (or wait in the queue), send,
and if that worker cannot be reached, select again among the others. With its first output the prompt counts as
computed; at the end, however it comes, the request is freed. This costs one call per output; all else is per request.
"""

import asyncio
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer, model_card
from dynamo.router import api, metrics, prefix_copies, route, selection
from dynamo.router.api import Decision, Prompt
from dynamo.router.worker_load import Capacity
from dynamo.runtime import client, requests

MAX_SESSIONS = 100_000


class SessionAffinity:
    """Session id → the worker of the session's last request, for `ttl_s` seconds after that request.

    Bounded: beyond `max_sessions` the sessions used longest ago are forgotten.
    """

    def __init__(self, ttl_s: float, *, max_sessions: int = MAX_SESSIONS) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request with all that is needed to send it once its worker is selected."""

    key: str  # the router's own id: callers choose `request.id`, and may use one twice
    prompt: Prompt
    request: generate.Request
    receiver: requests.Receiver
    options: route.RoutingOptions


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


class KvRouter:
    """A `route.Route` that selects workers by cached prefixes and by the load of the requests in flight."""

    def __init__(
        self,
        endpoint_client: client.EndpointClient,
        selector: selection.Selector,
        *,
        block_size: int,
        counts: metrics.RouteMetrics,
        clock: clocks.Clock,
        queue_timeout_s: float,
        sessions: SessionAffinity | None = None,
        listener: SequenceListener | None = None,
    ) -> None:
        self.selector = selector
        self._client = endpoint_client
        self._block_size = block_size
        self._counts = counts
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._sessions = sessions
        self._listener = listener or SequenceListener()
        self._copies: prefix_copies.PrefixCopies | None = None
        self._cards: Mapping[int, model_card.ModelCard] = {}
        self._computes_for_others = False  # its workers are prefill workers
        self._multi_rank_instances: frozenset[int] = frozenset()  # requests to them name a rank
        self._waiting: dict[str, asyncio.Future[Decision]] = {}
        self._numbers = itertools.count()
        endpoint_client.on_change(self._update_workers)

    def copy_prefixes(self, start_task: prefix_copies.StartTask) -> None:
        """Let workers copy prefixes from one another; before the model cards are set."""
        self._copies = prefix_copies.PrefixCopies(
            self._client, self.selector, self._counts, self._clock, start_task
        )

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        self._cards = dict(cards)
        if self._copies is not None:
            self._copies.sources.set_model_cards(cards)
        prefill = model_card.WorkerType.PREFILL
        self._computes_for_others = any(card.worker_type is prefill for card in cards.values())
        self._update_workers()

    async def open_stream(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        options: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream:
        self._counts.count_start(request.prompt_len)
        routed = RoutedRequest(
            key=f"{self._counts.router_id}-{next(self._numbers)}",
            prompt=self._make_prompt(request, options),
            request=request,
            receiver=receiver,
            options=options,
        )
        failed_instances: set[int] = set()
        while True:
            usable = self._client.usable(options.allowed_instances, failed_instances)
            routed = dataclasses.replace(routed, prompt=self._restrict(routed.prompt, usable))
            if options.on_explained is not None:
                explained = self.selector.explain(routed.prompt, self._clock.now())
                options.on_explained(explained, routed.prompt.sequence_hashes)
            decision = await self._select(
                routed.key, routed.prompt, options.add_disconnect_callback
            )
            try:
                return await self._send(routed, decision)
            except (errors.WorkerLost, errors.NoWorkers):  # NoWorkers: it has left since
                if options.instance_id is not None:
                    raise
                # a session's worker is only a preference: the next attempt may take any other
                prompt = dataclasses.replace(routed.prompt, pinned=None)
                routed = dataclasses.replace(routed, prompt=prompt)
                failed_instances.add(decision.worker.instance_id)

    def preview_instance(
        self, request: generate.Request, options: route.RoutingOptions = route.DEFAULT_OPTIONS
    ) -> int:
        _, decision = self._preview(request, options)
        return decision.worker.instance_id

    @property
    def instance_ids(self) -> frozenset[int]:
        """Return the instances that are registered and have a model card."""
        return frozenset(self._client.instances.keys() & self._cards.keys())

    def instances_with_lora(self, lora_name: str | None) -> frozenset[int] | None:
        """Return the instances that have the LoRA adapter; None, for all, if `lora_name` is None."""
        if lora_name is None:
            return None
        return frozenset(i for i, card in self._cards.items() if lora_name in card.lora_names)

    def min_active_requests(self, allowed_instances: Collection[int] | None = None) -> int | None:
        """Return the number of requests in flight at the least busy usable worker; None if no worker is usable."""
        usable = frozenset(self._client.usable(allowed_instances))
        loads = self.selector.active.loads.items()
        return min(
            (load.num_requests for worker, load in loads if worker.instance_id in usable),
            default=None,
        )

    def estimate_load(
        self, request: generate.Request, options: route.RoutingOptions = route.DEFAULT_OPTIONS
    ) -> api.LoadEstimate:
        """Estimate what the request would meet at the worker that it would be sent to. Raises NoWorkers."""
        prompt, decision = self._preview(request, options)
        load = self.selector.active.loads[decision.worker]
        num_ahead = load.backlog(self._clock.now())
        num_cached = min(prompt.num_tokens, int(decision.overlap_blocks * self._block_size))
        return api.LoadEstimate(
            num_new=prompt.num_tokens - num_cached,
            block_size=self._block_size,
            num_ahead=num_ahead,
            num_steps_ahead=num_ahead / load.capacity.max_num_batched_tokens,
            num_requests=load.num_requests,
            share_in_use=load.share_in_use(len(prompt.sequence_hashes)),
            tokens_per_s=load.prefill_speed.tokens_per_s,
        )

    def mark_prefill_completed(self, key: str) -> None:
        """Record that the prompt of this request is computed, and admit queued requests that now have room."""
        self.selector.mark_prefill_completed(key, self._clock.now())
        self._listener.mark_prefill_completed(key)
        self._admit_queued()

    def count_first_output(
        self, prompt: Prompt, cached_tokens: int | None, duration_s: float
    ) -> None:
        """Count how many of the prompt's tokens the worker found in its cache, if it says so, and how long it took."""
        self._counts.count_cached_tokens(prompt, cached_tokens)
        self._counts.observe_first_output(duration_s)

    def free_request(self, key: str) -> None:
        """Forget an ended request, and admit queued requests that now have room. Idempotent."""
        self.selector.free(key, self._clock.now())
        self._listener.free_sequence(key)
        self._admit_queued()

    def select_worker(
        self, packed_tokens: bytes, key: str | None, lora_name: str | None = None
    ) -> Decision:
        """Select a worker for a prompt that the caller sends itself (`blocks.pack`ed tokens).

        With a `key`, the request counts as in flight until `free_request(key)`. Raises NoWorkers or Overloaded.
        """
        prompt = Prompt.from_tokens(packed_tokens, self._block_size, blocks.seed_of(lora_name))
        if lora_name is not None:
            allowed = self.instances_with_lora(lora_name)
            prompt = dataclasses.replace(prompt, allowed_instances=allowed)
        if key is None:
            return self.selector.preview(prompt, self._clock.now())
        decision = self.selector.select(key, prompt, self._clock.now())
        if decision is None:
            self.selector.free(key, self._clock.now())
            raise errors.Overloaded("all workers are busy: try again later")
        self._listener.add_sequence(key, decision, prompt)
        return decision

    def _preview(
        self, request: generate.Request, options: route.RoutingOptions
    ) -> tuple[Prompt, Decision]:
        prompt = self._make_prompt(request, options)
        prompt = self._restrict(prompt, self._client.usable(options.allowed_instances))
        return prompt, self.selector.preview(prompt, self._clock.now())

    def _make_prompt(self, request: generate.Request, options: route.RoutingOptions) -> Prompt:
        """Hash the prompt's blocks, and pin it to the worker that its caller or its session names."""
        began_at = self._clock.now()
        local_hashes = blocks.local_hashes(request.hashed_ids, self._block_size, request.hash_seed)
        locally_hashed_at = self._clock.now()
        sequence_hashes = blocks.sequence_hashes(local_hashes)
        self._counts.observe_hashing(
            locally_hashed_at - began_at, self._clock.now() - locally_hashed_at
        )
        pinned: api.Worker | None = None
        if options.instance_id is not None:
            pinned = api.Worker(options.instance_id, request.data_parallel_rank or 0)
        elif self._sessions is not None and request.session_id is not None:
            usable = frozenset(self._client.usable(options.allowed_instances))
            live_workers = [w for w in self.selector.active.loads if w.instance_id in usable]
            pinned = self._sessions.find_worker(request.session_id, live_workers, self._clock.now())
        return Prompt(
            num_tokens=request.prompt_len,
            block_size=self._block_size,
            sequence_hashes=sequence_hashes,
            priority=request.priority,
            pinned=pinned,
            is_restricted=request.lora_name is not None,
            dp_rank=request.data_parallel_rank,
            is_prefilled=kv_transfer.is_prefilled(request.kv_transfer_params),
        )

    def _restrict(self, prompt: Prompt, usable: Sequence[int]) -> Prompt:
        """Limit the prompt to the usable instances, unless these are all. Raises NoWorkers if there are none."""
        if len(usable) == len(self._client.instances) and not prompt.is_restricted:
            return prompt
        if not usable:
            raise errors.NoWorkers(f"none of the instances of {self._client.name} can be reached")
        return dataclasses.replace(prompt, allowed_instances=frozenset(usable))

    async def _select(
        self, key: str, prompt: Prompt, add_callback: route.AddDisconnectCallback | None
    ) -> Decision:
        """Select a worker at once, or wait in the queue until one has room."""
        began_at = self._clock.now()
        decision = self.selector.select(key, prompt, self._clock.now())
        self._counts.observe_decision(self._clock.now() - began_at)
        if decision is None:
            decision = await self._wait_in_queue(key, prompt, add_callback)
            if prompt.is_restricted and not prompt.allows(decision.worker):
                self.free_request(key)
                raise errors.NoWorkers("the last worker that could serve it was lost in the wait")
        self._counts.count_request(decision.worker, prompt, decision.overlap_blocks)
        self._listener.add_sequence(key, decision, prompt)
        return decision

    async def _wait_in_queue(
        self, key: str, prompt: Prompt, add_callback: route.AddDisconnectCallback | None
    ) -> Decision:
        admission: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = admission
        if add_callback is not None:
            add_callback(lambda: _cancel_wait(admission))
        self._counts.enter_queue(prompt.num_tokens)
        began_at = self._clock.now()
        self._admit_queued()
        try:
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

    async def _send(self, routed: RoutedRequest, decision: Decision) -> requests.Stream:
        receiver = _RoutedReceiver(self, routed, self._clock)
        request, worker = routed.request, decision.worker
        if (
            worker.instance_id in self._multi_rank_instances
            and worker.dp_rank != request.data_parallel_rank
        ):
            request = msgspec.structs.replace(request, data_parallel_rank=worker.dp_rank)
        if self._copies is not None:
            request = self._copies.name_source(routed.prompt, request, worker)
        try:
            stream = await self._client.open(
                request,
                receiver,
                instance_id=worker.instance_id,
                headers=routed.options.headers,
                timeout_s=routed.options.timeout_s,
                on_asked=routed.options.on_dispatched,
                alternatives=self._alternatives_of(routed),
            )
        except BaseException:
            self.free_request(routed.key)
            raise
        if self._sessions is not None and request.session_id is not None:
            self._sessions.assign_worker(request.session_id, worker, self._clock.now())
        return _RoutedStream(stream, receiver)

    def _alternatives_of(self, routed: RoutedRequest) -> Callable[[], Collection[int]] | None:
        """Return what lists the workers that can take the request over; None if it can always go elsewhere."""
        if self._computes_for_others:  # the answering worker can compute the prompt
            return None
        return lambda: route.alternatives_of(routed.options, self._cards)

    def _update_workers(self) -> None:
        """Give selector and metrics the workers that are registered and have a model card."""
        workers = {
            api.Worker(instance_id, rank): _capacity(card)
            for instance_id, card in self._cards.items()
            if instance_id in self._client.instances
            for rank in range(card.runtime_config.data_parallel_size)
        }
        self._multi_rank_instances = frozenset(w.instance_id for w in workers if w.dp_rank)
        earlier_workers = set(self.selector.active.loads)
        self.selector.set_workers(workers)
        self._counts.show_workers(self.selector.active.loads, earlier_workers - workers.keys())
        if workers.keys() - earlier_workers:
            self._listener.refresh_peers()
        self._admit_queued()


def _cancel_wait(admission: asyncio.Future[Decision]) -> None:
    if not admission.done():
        admission.set_exception(errors.Cancelled("the caller went away"))


def _capacity(card: model_card.ModelCard) -> Capacity:
    config = card.runtime_config
    return Capacity(
        total_blocks=config.total_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or Capacity().max_num_batched_tokens,
    )


class _RoutedReceiver:
    """A receiver that reports the first output and the end of a request to the router."""

    __slots__ = (
        "_clock",
        "_deliver",
        "_has_begun",
        "_has_ended",
        "_opened_at",
        "_routed",
        "_router",
        "replied",
    )

    def __init__(self, router: KvRouter, routed: RoutedRequest, clock: clocks.Clock) -> None:
        self._router = router
        self._clock = clock
        self._routed = routed
        self._deliver: Callable[[generate.Output], None] = routed.receiver.receive
        self.replied: Callable[[msgspec.Raw], None] = routed.receiver.replied
        self._has_begun = self._has_ended = False
        self._opened_at = clock.now()

    def receive(self, output: generate.Output) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._router.mark_prefill_completed(self._routed.key)
            self._router.count_first_output(
                self._routed.prompt, output.cached_tokens, self._clock.now() - self._opened_at
            )
        self._deliver(output)

    def ended(self, error: errors.DynamoError | None) -> None:
        self.free_request()
        self._routed.receiver.ended(error)

    def free_request(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._router.free_request(self._routed.key)


class _RoutedStream:
    """A stream that frees the request when it is cancelled."""

    __slots__ = ("_receiver", "_stream")

    def __init__(self, stream: requests.Stream, receiver: _RoutedReceiver) -> None:
        self._stream = stream
        self._receiver = receiver

    def cancel(self) -> None:
        self._stream.cancel()
        self._receiver.free_request()

    def send_signal(self, signal: int) -> None:
        self._stream.send_signal(signal)
