"""A worker that batches: the engine of `engine.mock` itself, its scheduler, memory and timing, in virtual time.

Prompts are made of tokens that stand for the names of their blocks, so that the engine hashes and finds them as it does
those of real ones.
"""

import math
from collections.abc import Iterator, Sequence

from dynamo.engine.mock import answers, batch, memory, timing
from dynamo.protocols import blocks, generate, kv_events
from dynamo.router import worker_load
from dynamo.simulate.worker import Change, Progress
from dynamo.simulate.workload import Arrival

_WORDS = range(2**31, 2**31 + 64)  # what answers are made of: no block of a prompt looks like it


class BatchWorker:
    """Mutable."""

    def __init__(
        self, capacity: worker_load.Capacity, *, block_size: int, speedup_ratio: float = 1.0
    ) -> None:
        self.next_time = math.inf
        self._timing = timing.Timing(speedup_ratio=speedup_ratio)
        self._block_size = block_size
        self._name_by_hash: dict[int, int] = {}
        self._memory = memory.MockMemory(
            cycle := answers.TokenCycle(_WORDS),
            num_blocks=capacity.total_blocks,
            block_size=block_size,
            prefix_caching=True,
        )
        limits = batch.BatchLimits(
            max_num_seqs=capacity.max_num_seqs,
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            context_length=capacity.total_blocks * block_size,
        )
        self._batch = batch.MockBatch(cycle, self._memory, limits)

    def submit(self, request_id: str, arrival: Arrival, now: float) -> None:
        """It joins the next step. Who is idle begins one at once."""
        packed = self._tokens(arrival)
        hashes = blocks.sequence_hashes(blocks.local_hashes(packed, self._block_size))
        self._name_by_hash.update(zip(hashes, arrival.names, strict=False))
        self._batch.submit(
            generate.Request(
                id=request_id,
                model="",
                token_ids=packed,
                stop_conditions=generate.StopConditions(max_tokens=arrival.num_output),
            )
        )
        if self.next_time == math.inf:
            self._begin(now)

    def advance(self, now: float) -> Progress:
        """A step is over, and the next begins."""
        progress = Progress()
        for request_id, output in self._batch.commit():
            if output.cached_tokens is not None:
                progress.first_outputs.append((request_id, output.cached_tokens))
            if output.finish_reason is not None:
                progress.ended.append(request_id)
        progress.changes += self._changes(self._batch.take_events())
        self.next_time = math.inf
        if self._batch.has_work:
            self._begin(now)
        return progress

    def _begin(self, now: float) -> None:
        plan = self._batch.schedule()
        self.next_time = now + self._timing.step_s(
            num_prompt_tokens=plan.num_prompt_tokens,
            num_decoding=plan.num_decoding,
            active_share=plan.active_share,
        )

    def _tokens(self, arrival: Arrival) -> bytes:
        whole = b"".join([blocks.pack((name,)) * self._block_size for name in arrival.names])
        return whole[: arrival.num_tokens * blocks.TOKEN_BYTES]

    def _changes(self, events: Sequence[kv_events.KvEvent]) -> Iterator[Change]:
        """By the workload's names; blocks of answers have none, and nobody will ask for them."""
        for event in events:
            is_stored = isinstance(event, kv_events.Stored)
            hashes = (
                [block.block_hash for block in event.blocks]
                if isinstance(event, kv_events.Stored)
                else getattr(event, "block_hashes", ())
            )
            names = [self._name_by_hash[h] for h in hashes if h in self._name_by_hash]
            yield Change(is_stored, names)
