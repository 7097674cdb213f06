"""A prefill worker and a decode worker with the schedulers and blocks of the mock engine, in virtual time.

They are what the planner's workers stand for. The times of HTTP, frontend and planes are left out.
"""

import math

from dynamo.engine.mock import answers, batch, memory, timing
from dynamo.protocols import blocks, generate, kv_transfer
from dynamo.simulate.workers import EventClock

TOKENS = range(2**31, 2**31 + 64)  # of answers; never part of a prompt
BYTES_PER_TOKEN, BYTES_PER_S = 131_072, 64e9


class Engine:
    """The steps of one engine. It begins one when all that comes at the same time has come."""

    def __init__(self, clock, num_blocks, block_size, on_outputs, on_import):
        self._clock, self._on_outputs, self._on_import = clock, on_outputs, on_import
        pool = memory.MockMemory(num_blocks=num_blocks, block_size=block_size, prefix_caching=True)
        limits = batch.BatchLimits(
            max_num_seqs=64, max_num_batched_tokens=8192, context_length=num_blocks * block_size
        )
        self.batch = batch.MockBatch(answers.TokenCycle(TOKENS), pool, limits)
        self._has_step = False

    def wake(self):
        """Begin a step soon, unless one runs."""
        self._clock.call_later(0.0, self._begin)

    def submit(self, request_id, packed, num_output, params, first_token=None):
        stop = generate.StopConditions(max_tokens=num_output)
        request = generate.Request(
            id=request_id, model="", token_ids=packed, stop_conditions=stop,
            kv_transfer_params=params,
        )  # fmt: skip
        self.batch.submit(request, first_token)
        self.wake()

    def _begin(self):
        if self._has_step:
            return
        plan = self.batch.schedule()
        for kv_import in self.batch.take_imports():
            self._on_import(kv_import)
        self._on_outputs(self.batch.take_outputs())
        self._has_step = not plan.is_empty
        if self._has_step:
            seconds = timing.Timing().step_s(
                num_prompt_tokens=plan.num_prompt_tokens,
                num_decoding=plan.num_decoding,
                active_share=plan.active_share,
            )
            self._clock.call_later(seconds, self._end)

    def _end(self):
        self._has_step = False
        self.wake()
        outputs = [*self.batch.commit(), *self.batch.take_outputs()]
        self.batch.take_events()
        self._on_outputs(outputs)


class EnginePair:
    """Two engines, and the times at which each request came, had its first token, and ended."""

    def __init__(self, num_blocks, block_size, on_end=lambda: None):
        self.clock = EventClock()
        self.at, self.first_at, self.ended_at = {}, {}, {}
        self._requests, self._on_end, self._block_size = {}, on_end, block_size
        size = num_blocks, block_size
        self._prefill = Engine(self.clock, *size, self._hand_over, None)
        self._decode = Engine(self.clock, *size, self._note_ends, self._copy)

    def submit(self, arrival):
        """Let a request of a workload come now."""
        request_id = str(len(self.at))
        names = [blocks.pack((name,)) * self._block_size for name in arrival.names]
        packed = b"".join(names)[: arrival.num_tokens * blocks.TOKEN_BYTES]
        self.at[request_id] = self.clock.now()
        self._requests[request_id] = packed, arrival.num_output
        self._prefill.submit(request_id, packed, 1, kv_transfer.PREFILL_WITH_TOKEN)

    def run(self):
        """Let time pass until nothing is left to do."""
        while self.clock.next_time < math.inf:
            self.clock.advance_to(self.clock.next_time)

    def _hand_over(self, outputs):
        leased = self._prefill.batch.take_newly_leased()
        for request_id, output in outputs:
            self.first_at[request_id] = self.clock.now()
            lease = leased[request_id, output.index].lease
            token = kv_transfer.FirstToken(output.token_ids[0], None, output.cached_tokens)
            remote = kv_transfer.RemoteBlocks(
                remote_block_ids=lease.block_ids, remote_hold_id=lease.lease_id,
                remote_engine_id="prefill", first_token=token,
            )  # fmt: skip
            params = kv_transfer.KvTransferParams(do_remote_prefill=True, remote=remote)
            self._decode.submit(request_id, *self._requests[request_id], params, token)

    def _copy(self, kv_import):
        num_tokens = len(kv_import.local_blocks) * self._block_size
        seconds = num_tokens * BYTES_PER_TOKEN / BYTES_PER_S
        self.clock.call_later(seconds, self._end_copy, kv_import)

    def _end_copy(self, kv_import):
        self._decode.batch.end_import(kv_import.import_id, is_copied=True)
        self._prefill.batch.release_lease(kv_import.remote.remote_hold_id)
        self._decode.wake()
        self._prefill.wake()

    def _note_ends(self, outputs):
        for request_id, output in outputs:
            if output.finish_reason is not None:
                self.ended_at[request_id] = self.clock.now()
                self._on_end()
