"""Real vLLM for tests: on CPU, with a small model of random weights.

An engine takes half a minute to start, so the tests of a module share one, and the event loop on which it lives. A
module that has vLLM imports these fixtures, and runs its tests in the module's loop.
"""

import warnings

import pytest
import pytest_asyncio

import vllm_models
from dynamo.engine.adapters.settings import VllmConfig
from engine_suite import Host, Sink
from foreign_engine import shared

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's, and those of what it imports
    from dynamo.engine.adapters.vllm import engine as adapter

__all__ = ["host", "make_engine", "shared"]
FLAGS = (
    "--enforce-eager --dtype float32 --block-size 32 --num-gpu-blocks-override 24"
    " --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 64"
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # there may be two at a time
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    directory = vllm_models.make(tmp_path_factory.mktemp("qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield lambda: adapter.build(directory, VllmConfig(engine_args=tuple(FLAGS.split())), "m")


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared):
    engine, sink, facts = shared
    sink.to = Sink()
    await engine.clear_kv_blocks()
    sink.to = Sink()
    yield Host(engine, sink.to, facts)

    assert not sink.to.deaths
