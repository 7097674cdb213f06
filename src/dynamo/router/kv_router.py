"""Which worker the requests of a conversation go to: the one that had its last request, for as long as it is recent.

Bounded: the sessions that were used longest ago are forgotten first.

The router of one model at one endpoint: it asks the deciders who gets a request, and keeps them informed.

`KvRouter.open` is the path: name the prompt's blocks, choose (or wait), send, and if that worker cannot be reached,
choose again among the others. From the first output on, the prompt counts as computed; at the end, however it comes,
the request is freed. Per output this costs one call; everything else is per request.
"""

import asyncio
import dataclasses
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import blocks, generate, kv_transfer, model_card
from dynamo.router import api, metrics, route, selection
from dynamo.router.api import Decision, Prompt
from dynamo.router.worker_load import Capacity
from dynamo.runtime import client, requests

MAX_SESSIONS = 100_000


class SessionAffinity:
    """Session id to worker, for `ttl_s` after the last request."""

    def __init__(self, ttl_s: float, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._worker_by_session: OrderedDict[str, tuple[api.Worker, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_by_session)

    def worker_of(
        self, session_id: str, living: Container[api.Worker], now: float
    ) -> api.Worker | None:
        """The session's worker, if it has one that lives and was used within the time to live."""
        worker, expires_at = self._worker_by_session.get(session_id, (None, 0.0))
        if worker is None or expires_at <= now or worker not in living:
            return None
        return worker

    def remember(self, session_id: str, worker: api.Worker, now: float) -> None:
        """A request of the session went to this worker."""
        self._worker_by_session[session_id] = worker, now + self._ttl_s
        self._worker_by_session.move_to_end(session_id)
        if len(self._worker_by_session) > self._max_sessions:
            self._worker_by_session.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a request needs once its worker is known."""

    key: str  # ours: callers may choose ids, even one id twice
    prompt: Prompt
    request: generate.Request
    receiver: requests.Receiver
    terms: route.RoutingOptions


class Sharing:
    """Who else wants to know what we have in flight: nobody."""

    def added(self, key: str, decision: Decision, prompt: Prompt) -> None:
        """A request goes to a worker."""

    def prefill_completed(self, key: str) -> None:
        """Its prompt is computed."""

    def freed(self, key: str) -> None:
        """It is over."""

    def catch_up(self) -> None:
        """We know new workers."""


class KvRouter:
    """Knows what is in flight at each worker, and chooses by that and by what each one's cache holds."""

    def __init__(
        self,
        asked: client.EndpointClient,
        selector: selection.Selector,
        *,
        block_size: int,
        counts: metrics.RouteMetrics,
        clock: clocks.Clock,
        queue_timeout_s: float,
        sessions: SessionAffinity | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self.selector = selector
        self._client = asked
        self._block_size = block_size
        self._counts = counts
        self._clock = clock
        self._queue_timeout_s = queue_timeout_s
        self._sessions = sessions
        self._sharing = sharing or Sharing()
        self._cards: Mapping[int, model_card.ModelCard] = {}
        self._ranked: frozenset[int] = frozenset()  # instances that must be told a rank
        self._waiting: dict[str, asyncio.Future[Decision]] = {}
        self._numbers = itertools.count()
        asked.on_change(self._follow)

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """As `route.Route`."""
        self._cards = dict(cards)
        self._follow()

    async def open(
        self,
        request: generate.Request,
        receiver: requests.Receiver,
        terms: route.RoutingOptions = route.DEFAULT_OPTIONS,
    ) -> requests.Stream:
        """As `route.Route`."""
        sending = Sending(
            key=f"{self._counts.router_id}-{next(self._numbers)}",
            prompt=self._read(request, terms.instance_id, terms.among),
            request=request,
            receiver=receiver,
            terms=terms,
        )
        tried: set[int] = set()
        while True:
            usable = self._client.usable(terms.among, tried)
            sending = dataclasses.replace(sending, prompt=self._restrict(sending.prompt, usable))
            decision = await self._choose(sending.key, sending.prompt, terms.on_gone)
            try:
                return await self._send(sending, decision)
            except errors.WorkerLost:
                if terms.instance_id is not None:
                    raise
                # its conversation's worker is gone: any other will do
                sending = dataclasses.replace(
                    sending, prompt=dataclasses.replace(sending.prompt, pinned=None)
                )
                tried.add(decision.worker.instance_id)

    def choose(
        self,
        request: generate.Request,
        *,
        instance_id: int | None = None,
        among: Collection[int] | None = None,
    ) -> int:
        """As `route.Route`."""
        read = self._read(request, instance_id, among)
        prompt = self._restrict(read, self._client.usable(among))
        return self.selector.preview(prompt, self._clock.now()).worker.instance_id

    @property
    def instance_ids(self) -> frozenset[int]:
        """Who can be asked."""
        return frozenset(self._client.instances.keys() & self._cards.keys())

    def having(self, lora_name: str | None) -> frozenset[int] | None:
        """Who has this adapter; None: none is wanted, so anybody will do."""
        if lora_name is None:
            return None
        return frozenset(one for one, card in self._cards.items() if lora_name in card.lora_names)

    def num_before(self, among: Collection[int] | None = None) -> int | None:
        """Requests where the fewest are; None if there is nobody to ask."""
        usable = frozenset(self._client.usable(among))
        loads = self.selector.active.loads.items()
        return min(
            (load.num_requests for one, load in loads if one.instance_id in usable), default=None
        )

    def prospect(
        self, request: generate.Request, terms: route.RoutingOptions = route.DEFAULT_OPTIONS
    ) -> api.LoadEstimate:
        """What this request would find where it would be sent first; nobody is asked. Raises NoWorkers."""
        read = self._read(request, terms.instance_id, terms.among)
        prompt = self._restrict(read, self._client.usable(terms.among))
        now = self._clock.now()
        decision = self.selector.preview(prompt, now)
        load = self.selector.active.loads[decision.worker]
        num_ahead = load.backlog(now)
        num_known = min(prompt.num_tokens, int(decision.overlap_blocks * self._block_size))
        return api.LoadEstimate(
            num_new=prompt.num_tokens - num_known,
            num_ahead=num_ahead,
            num_steps_ahead=num_ahead / load.capacity.max_num_batched_tokens,
            num_requests=load.num_requests,
            share_in_use=load.share_in_use(len(prompt.sequence_hashes)),
            tokens_per_s=load.pace.tokens_per_s,
        )

    def prefill_completed(self, key: str) -> None:
        """The prompt of this request is computed."""
        self.selector.first_output(key, self._clock.now())
        self._sharing.prefill_completed(key)
        self._admit()

    def computed(self, prompt: Prompt, cached_tokens: int | None) -> None:
        """A worker has told how much of a prompt it had."""
        self._counts.computed(prompt, cached_tokens)

    def free(self, key: str) -> None:
        """This request is over, however it ended. Idempotent."""
        self.selector.free(key, self._clock.now())
        self._sharing.freed(key)
        self._admit()

    def decide(self, packed: bytes, key: str | None, lora_name: str | None = None) -> Decision:
        """Who should get these tokens; with `key`, counted from now on as in flight. Raises NoWorkers or Overloaded."""
        prompt = Prompt.from_tokens(packed, self._block_size, seed=blocks.seed_of(lora_name))
        if lora_name is not None:
            prompt = dataclasses.replace(prompt, among=self.having(lora_name))
        if key is None:
            return self.selector.preview(prompt, self._clock.now())
        decision = self.selector.select(key, prompt, self._clock.now())
        if decision is None:
            self.selector.free(key, self._clock.now())
            raise errors.Overloaded("all workers are busy: try again later")
        self._sharing.added(key, decision, prompt)
        return decision

    def _read(
        self,
        request: generate.Request,
        instance_id: int | None,
        among: Collection[int] | None,
    ) -> Prompt:
        """What may be known of the request, and where it must go, if its caller or its conversation says so."""
        began_at = time.perf_counter()
        seed = blocks.seed_of(request.lora_name)
        local = blocks.local_hashes(request.token_ids, self._block_size, seed)
        named_at = time.perf_counter()
        sequence = blocks.sequence_hashes(local)
        self._counts.hashed(named_at - began_at, time.perf_counter() - named_at)
        return Prompt(
            num_tokens=request.prompt_len,
            block_size=self._block_size,
            sequence_hashes=sequence,
            priority=request.priority,
            pinned=self._pinned(request, instance_id, among),
            is_bound=request.lora_name is not None,
            dp_rank=request.data_parallel_rank,
            is_prefilled=kv_transfer.is_prefilled(request.kv_transfer_params),
        )

    def _pinned(
        self,
        request: generate.Request,
        instance_id: int | None,
        among: Collection[int] | None,
    ) -> api.Worker | None:
        if instance_id is not None:
            return api.Worker(instance_id, request.data_parallel_rank or 0)
        if self._sessions is None or request.session_id is None:
            return None
        usable = frozenset(self._client.usable(among))
        living = [one for one in self.selector.active.loads if one.instance_id in usable]
        return self._sessions.worker_of(request.session_id, living, self._clock.now())

    def _restrict(self, prompt: Prompt, usable: Sequence[int]) -> Prompt:
        """Let only the usable be chosen, if that says anything."""
        if len(usable) == len(self._client.instances) and not prompt.is_bound:
            return prompt
        if not usable:
            raise errors.NoWorkers(f"none of the instances of {self._client.name} can be reached")
        return dataclasses.replace(prompt, among=frozenset(usable))

    async def _choose(self, key: str, prompt: Prompt, on_gone: route.OnGone | None) -> Decision:
        """The worker that gets it; at once, or when it is its turn."""
        began_at = time.perf_counter()
        decision = self.selector.select(key, prompt, self._clock.now())
        self._counts.decided(time.perf_counter() - began_at)
        if decision is None:
            decision = await self._wait(key, prompt, on_gone)
            if prompt.is_bound and not prompt.allows(decision.worker):
                self.free(key)
                raise errors.NoWorkers("while it waited, the last that could answer it was lost")
        self._counts.sent(decision.worker, prompt, decision.overlap_blocks)
        self._sharing.added(key, decision, prompt)
        return decision

    async def _wait(self, key: str, prompt: Prompt, on_gone: route.OnGone | None) -> Decision:
        turn: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[key] = turn
        if on_gone is not None:
            on_gone(lambda: _give_up(turn))
        self._counts.waits(prompt.num_tokens)
        began_at = self._clock.now()
        self._admit()
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await turn
        except TimeoutError:
            self.free(key)
            self._counts.gave_up()
            raise errors.Overloaded(
                f"all workers have been busy for {self._queue_timeout_s:g} s: try again later",
                retry_after_s=self._queue_timeout_s,
            ) from None
        except (asyncio.CancelledError, errors.Cancelled):
            self.free(key)
            raise
        finally:
            del self._waiting[key]
            self._counts.waited(prompt.num_tokens, self._clock.now() - began_at)

    def _admit(self) -> None:
        """Let go who need not wait any more."""
        if not self.selector.num_waiting:
            return
        for key, decision in self.selector.admit(self._clock.now()):
            turn = self._waiting.get(key)
            if turn is not None and not turn.done():
                turn.set_result(decision)
            else:  # it gave up in this very moment
                self.selector.free(key, self._clock.now())

    async def _send(self, sending: Sending, decision: Decision) -> requests.Stream:
        routed = _Routed(self, sending)
        request, worker = sending.request, decision.worker
        if worker.instance_id in self._ranked and worker.dp_rank != request.data_parallel_rank:
            request = msgspec.structs.replace(request, data_parallel_rank=worker.dp_rank)
        try:
            stream = await self._client.open(
                request,
                routed,
                instance_id=worker.instance_id,
                headers=sending.terms.headers,
                timeout_s=sending.terms.timeout_s,
                on_asked=sending.terms.on_asked,
            )
        except BaseException:
            self.free(sending.key)
            raise
        if self._sessions is not None and request.session_id is not None:
            self._sessions.remember(request.session_id, worker, self._clock.now())
        return _RoutedStream(stream, routed)

    def _follow(self) -> None:
        """Instances or cards came or went."""
        workers = {
            api.Worker(instance_id, rank): _capacity(card)
            for instance_id, card in self._cards.items()
            if instance_id in self._client.instances
            for rank in range(card.runtime_config.data_parallel_size)
        }
        self._ranked = frozenset(worker.instance_id for worker in workers if worker.dp_rank)
        known = set(self.selector.active.loads)
        self.selector.set_workers(workers)
        self._counts.show(self.selector.active.loads, known - workers.keys())
        if workers.keys() - known:
            self._sharing.catch_up()
        self._admit()


def _give_up(turn: asyncio.Future[Decision]) -> None:
    if not turn.done():
        turn.set_exception(errors.Cancelled("the caller went away"))


def _capacity(card: model_card.ModelCard) -> Capacity:
    facts = card.runtime_config
    return Capacity(
        total_blocks=facts.total_kv_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens or Capacity().max_num_batched_tokens,
    )


class _Routed:
    """A receiver that tells the router of the first output and of the end."""

    __slots__ = ("_deliver", "_has_begun", "_is_over", "_router", "_sending", "replied")

    def __init__(self, router: KvRouter, sending: Sending) -> None:
        self._router = router
        self._sending = sending
        self._deliver: Callable[[generate.Output], None] = sending.receiver.receive
        self.replied: Callable[[msgspec.Raw], None] = sending.receiver.replied
        self._has_begun = self._is_over = False

    def receive(self, output: generate.Output) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._router.prefill_completed(self._sending.key)
            self._router.computed(self._sending.prompt, output.cached_tokens)
        self._deliver(output)

    def ended(self, error: errors.DynamoError | None) -> None:
        self.over()
        self._sending.receiver.ended(error)

    def over(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._router.free(self._sending.key)


class _RoutedStream:
    """A stream whose cancellation frees the request."""

    __slots__ = ("_routed", "_stream")

    def __init__(self, stream: requests.Stream, routed: _Routed) -> None:
        self._stream = stream
        self._routed = routed

    def cancel(self) -> None:
        self._stream.cancel()
        self._routed.over()

    def cancel_choice(self, index: int) -> None:
        self._stream.cancel_choice(index)
