"""An engine of one's own: it answers each prompt with the prompt, a token every 10 ms."""

import asyncio
import sys

from dynamo.engine import api
from dynamo.protocols import blocks, generate, load
from dynamo.worker import engines, main


class EchoEngine:
    capabilities = api.EngineCapabilities()

    def __init__(self, directory, settings, room):
        self._running = {}  # request id -> its task

    async def start(self, sink):
        self._sink = sink
        return api.EngineFacts(
            context_length=4096, kv_block_size=16, total_kv_blocks=1024, max_num_seqs=64,
            max_num_batched_tokens=4096, supports_logprobs=False, supports_prompt_logprobs=False,
        )  # fmt: skip

    def submit(self, request):
        self._running[request.id] = asyncio.create_task(self._answer(request))

    async def _answer(self, request):
        tokens = blocks.unpack(request.token_ids)
        limit = min(len(tokens), request.stop_conditions.max_tokens or len(tokens))
        reason = generate.FinishReason("eos" if limit == len(tokens) else "length")
        for number, token in enumerate(tokens[:limit], 1):
            await asyncio.sleep(0.01)
            choices = range(request.sampling_options.n)
            end = reason if number == limit else None
            outputs = [generate.Output((token,), end, index=index) for index in choices]
            self._sink.outputs([api.EngineOutput(request.id, output) for output in outputs])
        del self._running[request.id]

    def abort(self, request_id):
        if task := self._running.pop(request_id, None):
            task.cancel()

    def abort_choice(self, request_id, index):
        """Go on: the frontend leaves out what it does not need."""

    def load(self):
        slots = load.WorkerStats(
            request_active_slots=len(self._running), request_total_slots=64, num_requests_waiting=0
        )
        memory = load.KvStats(kv_active_blocks=0, kv_total_blocks=1024)
        return [load.ForwardPassMetrics(worker_stats=slots, kv_stats=memory)]

    async def clear_kv_blocks(self):
        """Nothing is cached."""

    async def stop(self):
        for request_id in list(self._running):
            self.abort(request_id)


engines.KIND_BY_NAME["echo"] = engines.EngineKind(engine="__main__:EchoEngine", needs_weights=False)

if __name__ == "__main__":
    sys.exit(main.main("echo"))
