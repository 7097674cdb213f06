"""What every engine promises its host, over real vLLM: on CPU, with a small model of random weights.

An engine takes half a minute to start, so the tests share one, and the event loop on which it lives; only those that
end one start their own. Without vLLM all of this is skipped: `make test-vllm` makes an environment that has it.
"""

import importlib.util
import multiprocessing
import os
import signal
import warnings

import pytest
import pytest_asyncio

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import vllm_models
from dynamo.engine.adapters.vllm.settings import VllmConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from engine_suite import Host, Sink

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's, and those of what it imports
    from dynamo.engine.adapters.vllm import engine as adapter

# The adapter tells no KV events.
del test_events_name_the_blocks_of_prompt_and_answer  # noqa: F821
del test_events_never_tell_of_more_blocks_than_there_are  # noqa: F821
del test_events_tell_that_all_was_forgotten  # noqa: F821

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
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


class Forwarding:
    """The shared engine's sink: gives what it hears to the sink of the test that runs."""

    def __init__(self):
        self.to = Sink()
        for name in ("outputs", "failed", "kv_events", "died"):
            setattr(self, name, lambda *args, name=name: getattr(self.to, name)(*args))


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    directory = vllm_models.make(tmp_path_factory.mktemp("qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield lambda: adapter.build(directory, VllmConfig(engine_args=tuple(FLAGS.split())))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(make_engine):
    engine, sink = make_engine(), Forwarding()
    facts = await engine.start(sink)
    yield engine, sink, facts
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared):
    engine, sink, facts = shared
    sink.to = Sink()
    await engine.clear_kv_blocks()
    sink.to = Sink()
    yield Host(engine, sink.to, facts)

    assert not sink.to.deaths


@pytest.fixture
def break_down():
    def kill_core(engine):
        newest = max(multiprocessing.active_children(), key=lambda child: child.pid)
        os.kill(newest.pid, signal.SIGKILL)

    return kill_core


async def test_start_gives_the_facts_of_vllms_configuration(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 32, 24)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert facts.supports_guided
