"""What the adapter uses of TensorRT-LLM, in the shapes of its sources, over a `FakeModel`.

`llmapi/llm.py` (LLM), `executor/result.py` (RequestOutput, CompletionOutput, Logprob), `sampling_params.py`; statistics
as trtllm-serve's `/metrics` shows them.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import types
from typing import Any

import fake_model
import fake_sglang

ADAPTER = "dynamo.engine.adapters.trtllm"


class RequestError(RuntimeError):
    pass


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: Any = None
    detokenize: bool = True


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int


class RequestOutput:
    """Iterating over it brings this very object, after each step."""

    def __init__(self, llm, request, params):
        self._llm, self._request, self._params = llm, request, params
        self.cached_tokens = 0
        self._is_done = False
        self.outputs = [types.SimpleNamespace(finish_reason=None, stop_reason=None)]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._is_done:
            raise StopAsyncIteration
        tokens, end = await self._request.steps.get()
        if end == "broken":
            raise RuntimeError("LLM is shutting down")
        self._is_done = end is not None
        self.cached_tokens = self._request.num_cached
        answer = self.outputs[0]
        answer.token_ids_diff = tokens
        answer.logprobs_diff = [self._scored(token) for token in tokens]
        answer.finish_reason, answer.stop_reason = self._reason(end)
        return self

    def abort(self):
        if not self._is_done:
            self._llm.model.abort(self._request)

    def _scored(self, token):
        ranked = fake_model.scored(token, self._params.logprobs or 1)
        return {name: Logprob(value, i) for i, (name, value) in enumerate(ranked.items(), start=1)}

    def _reason(self, end):
        if end == self._params.end_id:
            return "stop", None
        named = {None: None, "length": "length", "abort": "cancelled"}
        return (named[end], None) if end in named else ("stop", end)


class LLM:
    def __init__(self, **arguments):
        if arguments["tensor_parallel_size"] < 1:
            raise ValueError("tensor_parallel_size must be positive")
        self.arguments = arguments
        self.model = fake_model.FakeModel()
        self._executor = types.SimpleNamespace(is_shutdown=lambda: self.model.is_dead)

    def generate_async(self, inputs, *, sampling_params, streaming):
        assert streaming
        if self.model.is_dead:
            raise RuntimeError("LLM is shutting down")
        ends = [sampling_params.end_id, *(sampling_params.stop_token_ids or ())]
        request = self.model.ask(inputs, max_tokens=sampling_params.max_tokens, ends=ends)
        return RequestOutput(self, request, sampling_params)

    async def get_stats_async(self, timeout):
        yield {
            "iter": 1,
            "numActiveRequests": len(self.model.running),
            "numQueuedRequests": len(self.model.waiting),
            "kvCacheStats": {
                "maxNumBlocks": fake_model.BLOCKS,
                "usedNumBlocks": len(self.model.running),
                "tokensPerBlock": fake_model.BLOCK,
                "cacheHitRate": 0.5,
            },
        }
        await asyncio.sleep(0)

    def shutdown(self):
        self.model.is_dead = True


MODULES = {
    "tensorrt_llm": {"LLM": LLM, "SamplingParams": SamplingParams},
    "tensorrt_llm.executor.utils": {"RequestError": RequestError},
    "tensorrt_llm.llmapi": {"GuidedDecodingParams": dict, "KvCacheConfig": dict},
}


@contextlib.contextmanager
def adapter():
    """The adapter, which believes that TensorRT-LLM is there."""
    with fake_sglang.faked(MODULES, ADAPTER):
        yield importlib.import_module(ADAPTER)
