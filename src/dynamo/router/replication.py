"""The copies of prefixes between workers: which worker a request's prefix is copied from, and which prefixes are copied
ahead of need.

A request goes to a worker for its load and its cache alike, so it may meet one that lacks what another has.
`PrefixSources` names that other worker in the request; the worker that computes it decides by its own measurements
whether copying is faster (`disagg.peer_prefixes`).

`HotPrefixes` finds a prefix that one worker alone has, and that so many prompts begin with that its queue grows. The
least busy worker then gets a copy, by a request of one token, before the next prompts come. It is bounded: a few copies
at a time, and the same prefix again only after `REST_S`.
"""  # decider

import base64
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.protocols import kv_transfer, model_card
from dynamo.router.api import Prompt, Worker
from dynamo.router.worker_load import WorkerLoad

MIN_BLOCKS = 2  # that another worker must have more
MIN_HOT_PROMPTS = 4  # within `WINDOW_S`
MIN_QUEUE = 3  # requests more than at the least busy worker
WINDOW_S = 10.0
REST_S = 30.0
MAX_PREFIXES = 1024  # that are counted
MAX_COPIES = 2  # ahead of need, at once


class PrefixSources:
    """The workers that export cached prefixes. Mutable; its router owns it."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the path of the workers' endpoint."""
        self._endpoint = endpoint
        self._cards: dict[int, model_card.ModelCard] = {}
        self._metadata: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return len(self._metadata) > 1

    def set_model_cards(self, cards: Mapping[int, model_card.ModelCard]) -> None:
        """Replace the cards of all workers; those without usable metadata export nothing."""
        self._cards = dict(cards)
        self._metadata.clear()
        for instance_id, card in cards.items():
            data = card.runtime_config.runtime_data
            encoded = data.get(kv_transfer.METADATA_KEY)
            if data.get(kv_transfer.PREFIXES_KEY) is True and isinstance(encoded, str):
                try:
                    self._metadata[instance_id] = base64.b64decode(encoded, validate=True)
                except ValueError:
                    continue

    def find_source(
        self, prompt: Prompt, worker: Worker, cached: Mapping[Worker, int]
    ) -> kv_transfer.PrefixSource | None:
        """Return the worker that has most of a prompt, if it has more blocks than `worker`, where the prompt goes.

        `cached` are the leading blocks of the prompt that each worker has, in whatever tier.
        """
        if worker.instance_id not in self._metadata:
            return None
        sources = (w for w in cached if w.instance_id in self._metadata and w != worker)
        best = max(sources, key=lambda w: (cached[w], w), default=None)
        if best is None or cached[best] - cached.get(worker, 0) < MIN_BLOCKS:
            return None
        if self._cards[worker.instance_id].find_difference(self._cards[best.instance_id]):
            return None
        return kv_transfer.PrefixSource(
            endpoint=self._endpoint,
            instance_id=best.instance_id,
            dp_rank=best.dp_rank,
            metadata=self._metadata[best.instance_id],
            num_tokens=cached[best] * prompt.block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """The copy of the leading `num_blocks` blocks of a prefix to another worker, ahead of need."""

    source: Worker
    target: Worker
    num_blocks: int
    reason: str


class HotPrefixes:
    """The prefixes that many prompts begin with. Mutable; its router owns it."""

    def __init__(self) -> None:
        self.num_copies = 0  # that run; the caller counts them
        self._arrivals: OrderedDict[int, deque[float]] = OrderedDict()  # by hash of the last block
        self._rests: OrderedDict[int, float] = OrderedDict()  # until when

    def choose_copy(
        self,
        prompt: Prompt,
        worker: Worker,
        cached: Mapping[Worker, int],
        loads: Mapping[Worker, WorkerLoad],
        now: float,
    ) -> Replication | None:
        """Count a prompt that goes to `worker`, and return a copy to make of what that worker alone has of it."""
        num_blocks = cached.get(worker, 0)
        targets = [other for other in loads if other.instance_id != worker.instance_id]
        if num_blocks < MIN_BLOCKS or not targets or worker not in loads:
            return None
        if any(2 * cached.get(other, 0) >= num_blocks for other in targets):
            return None  # one of them has much of it
        name = prompt.sequence_hashes[num_blocks - 1]
        arrivals = self._arrivals.setdefault(name, deque(maxlen=MIN_HOT_PROMPTS))
        self._arrivals.move_to_end(name)
        if len(self._arrivals) > MAX_PREFIXES:
            self._arrivals.popitem(last=False)
        arrivals.append(now)
        target = min(targets, key=lambda other: (loads[other].num_requests, other))
        num_more = loads[worker].num_requests - loads[target].num_requests
        is_hot = len(arrivals) == MIN_HOT_PROMPTS and arrivals[0] > now - WINDOW_S
        if not is_hot or num_more < MIN_QUEUE or self.num_copies >= MAX_COPIES:
            return None
        if self._rests.get(name, 0.0) > now:
            return None
        self._rests[name] = now + REST_S
        if len(self._rests) > MAX_PREFIXES:
            self._rests.popitem(last=False)
        reason = (
            f"{MIN_HOT_PROMPTS} prompts in {now - arrivals[0]:.1f} s begin with {num_blocks} blocks that worker"
            f" {worker.instance_id:x} alone has; it has {num_more} requests more than worker {target.instance_id:x}"
        )
        return Replication(source=worker, target=target, num_blocks=num_blocks, reason=reason)
