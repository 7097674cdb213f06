"""The KV router of one model at one endpoint: a `route.Route` that sends requests where `kv_scheduler` selects.

`KvRouter.open_stream` is the path of a request: have a worker selected, send, and if that worker cannot be reached,
have another one selected. With its first output the prompt counts as computed; at the end, however it comes, the
request is freed. This costs one call per output; all else is per request.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from dynamo.base import clock as clocks
from dynamo.base import errors
from dynamo.protocols import generate, model_card
from dynamo.router import api, kv_scheduler, prefix_copies, route
from dynamo.router.worker_load import Capacity
from dynamo.runtime import client, requests

_logger = logging.getLogger(__name__)


class KvRouter:
    """A `route.Route` that selects workers by cached prefixes and by the load of the requests in flight."""

    def __init__(
        self,
        endpoint_client: client.EndpointClient,
        scheduler: kv_scheduler.KvScheduler,
        copies: prefix_copies.PrefixCopies,
        clock: clocks.Clock,
    ) -> None:
        self.scheduler = scheduler
        self._client = endpoint_client
        self._copies = copies
        self._clock = clock
        self._cards: Mapping[int, model_card.ModelCard] = {}
        self._computes_for_others = False  # its workers are prefill workers
        self._multi_rank_instances: frozenset[int] = frozenset()  # requests to them name a rank
        endpoint_client.on_change(self._update_workers)

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        for instance_id in cards.keys() - self._cards.keys():
            card = cards[instance_id]
            if card.kv_cache_block_size not in (0, self.scheduler.block_size):
                _logger.warning(
                    "the instance %x of %r gets requests without regard to its cache until all older workers have left:"
                    " its KV blocks have %d tokens, theirs %d",
                    instance_id, card.display_name, card.kv_cache_block_size, self.scheduler.block_size,
                )  # fmt: skip
        self._cards = dict(cards)
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
        key = self.scheduler.start_request(request.prompt_len)
        usable = self._client.usable(options.allowed_instances)
        prompt = self._prompt_of(request, options, usable)
        failed_instances: set[int] = set()
        while True:
            prompt = self._restrict(prompt, usable)
            if options.on_explained is not None:
                explained = self.scheduler.selector.explain(prompt, self._clock.now())
                options.on_explained(explained, prompt.sequence_hashes)
            decision = await self.scheduler.select(key, prompt, options.add_disconnect_callback)
            routed = _RoutedReceiver(self.scheduler, key, prompt, receiver, self._clock.now())
            try:
                return await self._send(request, routed, options, decision.worker)
            except (errors.WorkerLost, errors.NoWorkers):  # NoWorkers: it has left since
                if options.instance_id is not None:
                    raise
                # a session's worker is only a preference: the next attempt may take any other
                prompt = dataclasses.replace(prompt, pinned=None)
                failed_instances.add(decision.worker.instance_id)
                usable = self._client.usable(options.allowed_instances, failed_instances)

    def preview_instance(
        self, request: generate.Request, options: route.RoutingOptions = route.DEFAULT_OPTIONS
    ) -> int:
        return self.scheduler.preview(self._make_prompt(request, options)).worker.instance_id

    @property
    def cards(self) -> Mapping[int, model_card.ModelCard]:
        """Return the model cards of its workers, by instance id."""
        return self._cards

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
        return self.scheduler.min_active_requests(frozenset(self._client.usable(allowed_instances)))

    def estimate_load(
        self, request: generate.Request, options: route.RoutingOptions = route.DEFAULT_OPTIONS
    ) -> api.LoadEstimate:
        """Estimate what the request would meet at the worker that it would be sent to. Raises NoWorkers."""
        return self.scheduler.estimate_load(self._make_prompt(request, options))

    def _make_prompt(self, request: generate.Request, options: route.RoutingOptions) -> api.Prompt:
        """Return the prompt with the instances that it may go to now. Raises NoWorkers if there are none."""
        usable = self._client.usable(options.allowed_instances)
        return self._restrict(self._prompt_of(request, options, usable), usable)

    def _prompt_of(
        self, request: generate.Request, options: route.RoutingOptions, usable: Sequence[int]
    ) -> api.Prompt:
        prompt = self.scheduler.make_prompt(
            request, options.instance_id, usable, is_restricted=options.is_restricted
        )
        override = options.policy_override
        return prompt if override is None else dataclasses.replace(prompt, override=override)

    def _restrict(self, prompt: api.Prompt, usable: Sequence[int]) -> api.Prompt:
        """Limit the prompt to the usable instances, unless these are all. Raises NoWorkers if there are none."""
        if len(usable) == len(self._client.instances) and not prompt.is_restricted:
            return prompt
        if not usable:
            raise errors.NoWorkers(f"none of the instances of {self._client.name} can be reached")
        if prompt.is_restricted:
            return dataclasses.replace(prompt, allowed_instances=frozenset(usable))
        excluded = frozenset(self._client.instances.keys() - set(usable))
        return dataclasses.replace(prompt, excluded_instances=excluded)

    async def _send(
        self,
        request: generate.Request,
        receiver: "_RoutedReceiver",
        options: route.RoutingOptions,
        worker: api.Worker,
    ) -> requests.Stream:
        if (
            worker.instance_id in self._multi_rank_instances
            and worker.dp_rank != request.data_parallel_rank
        ):
            request = msgspec.structs.replace(request, data_parallel_rank=worker.dp_rank)
        request = self._copies.name_source(receiver.prompt, request, worker)
        try:
            stream = await self._client.open(
                request,
                receiver,
                instance_id=worker.instance_id,
                headers=options.headers,
                timeout_s=options.timeout_s,
                on_asked=options.on_dispatched,
                alternatives=self._alternatives_of(options),
                gives_up_early=self._computes_for_others,
            )
        except BaseException:
            receiver.free_request()
            raise
        self.scheduler.assign_session(request.session_id, worker)
        return _RoutedStream(stream, receiver)

    def _alternatives_of(
        self, options: route.RoutingOptions
    ) -> Callable[[], Collection[int]] | None:
        """Return what lists the workers that can take the request over; None if it can always go elsewhere."""
        if self._computes_for_others:  # the answering worker can compute the prompt
            return None
        return lambda: route.alternatives_of(options, self._cards)

    def _update_workers(self) -> None:
        """Give the scheduler the workers that are registered and have a model card."""
        workers = {
            api.Worker(instance_id, rank): _capacity(card)
            for instance_id, card in self._cards.items()
            if instance_id in self._client.instances
            for rank in range(card.runtime_config.data_parallel_size)
        }
        self._multi_rank_instances = frozenset(w.instance_id for w in workers if w.dp_rank)
        self.scheduler.set_workers(workers)


def _capacity(card: model_card.ModelCard) -> Capacity:
    config = card.runtime_config
    return Capacity(
        total_blocks=config.total_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or Capacity().max_num_batched_tokens,
    )


class _RoutedReceiver:
    """A receiver that reports the first output and the end of a request to the scheduler."""

    __slots__ = (
        "_deliver",
        "_deliver_all",
        "_has_begun",
        "_has_ended",
        "_key",
        "_receiver",
        "_scheduler",
        "_sent_at",
        "prompt",
        "replied",
    )

    def __init__(
        self,
        scheduler: kv_scheduler.KvScheduler,
        key: str,
        prompt: api.Prompt,
        receiver: requests.Receiver,
        sent_at: float,
    ) -> None:
        self._scheduler = scheduler
        self._key = key
        self.prompt = prompt
        self._receiver = receiver
        self._sent_at = sent_at
        self._deliver: Callable[[generate.Output], None] = receiver.receive
        self._deliver_all: Callable[[Sequence[generate.Output]], None] | None
        self._deliver_all = getattr(receiver, "receive_all", None)
        self.replied: Callable[[msgspec.Raw], None] = receiver.replied
        self._has_begun = self._has_ended = False

    def receive(self, output: generate.Output) -> None:
        if not self._has_begun:
            self._record_first(output)
        self._deliver(output)

    @property
    def receive_all(self) -> Callable[[Sequence[generate.Output]], None] | None:
        """Return what takes outputs that came together, if the receiver does; asked once for each request."""
        return self._receive_all if self._deliver_all is not None else None

    def _receive_all(self, outputs: Sequence[generate.Output]) -> None:
        if not self._has_begun:
            self._record_first(outputs[0])
        assert self._deliver_all is not None
        self._deliver_all(outputs)

    def _record_first(self, output: generate.Output) -> None:
        self._has_begun = True
        self._scheduler.record_first_output(
            self._key, self.prompt, output.cached_tokens, self._sent_at
        )

    def ended(self, error: errors.DynamoError | None) -> None:
        try:
            self.free_request()
        finally:  # whatever a policy does to those that wait
            self._receiver.ended(error)

    def free_request(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._scheduler.free_request(self._key)


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
