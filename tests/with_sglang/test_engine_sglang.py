"""What every engine promises its host, over real SGLang: `make test-sglang MODEL=DIRECTORY`, beside a GPU."""

import importlib.util
import os
import signal

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip(
        "sglang is not installed here, and needs a GPU: make test-sglang", allow_module_level=True
    )

import pytest_asyncio

from dynamo.engine.adapters import sglang
from dynamo.engine.adapters.settings import SglangConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from engine_suite import Host, Sink
from foreign_engine import model_directory, shared  # noqa: F401 (a fixture)

MODEL = model_directory()
FLAGS = (
    "--context-length 512 --page-size 16 --max-running-requests 8 --max-total-tokens 1024"
    " --chunked-prefill-size 64 --disable-cuda-graph"
)

# SGLang ends all children of this process with one engine, so that a second beside the
# shared one cannot be tested here.
del test_stopping_drops_requests_without_an_error  # noqa: F821
del test_the_death_of_an_engine_is_reported_once  # noqa: F821

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def make_engine():
    settings = SglangConfig(load_tokenizer=True, engine_args=tuple(FLAGS.split()))
    return lambda: sglang.build(MODEL, settings, "m")


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared):  # noqa: F811 (the fixture)
    engine, sink, facts = shared
    await engine.clear_kv_blocks()
    sink.to = Sink()
    yield Host(engine, sink.to, facts)

    assert not sink.to.deaths


async def test_start_returns_the_facts_of_sglangs_configuration(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 16, 64)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)


async def test_sigquit_of_a_failed_process_is_the_engines_death(shared):  # noqa: F811 (the fixture)
    """The last one: the engine is beyond use afterwards."""
    _, sink, _ = shared
    sink.to = Sink()
    os.kill(os.getpid(), signal.SIGQUIT)
    await sink.to.until(lambda: sink.to.deaths)

    assert len(sink.to.deaths) == 1
