"""What every engine promises its host, over real TensorRT-LLM: `make test-trtllm MODEL=DIRECTORY`, beside a GPU."""

import importlib.util

import pytest

if importlib.util.find_spec("tensorrt_llm") is None:
    pytest.skip(
        "tensorrt_llm is not installed here, and needs a GPU: make test-trtllm",
        allow_module_level=True,
    )

from dynamo.engine.adapters import trtllm
from dynamo.engine.adapters.settings import TrtllmConfig
from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from foreign_engine import *  # noqa: F403 (its fixtures)
from foreign_engine import model_directory

MODEL = model_directory()

# The adapter publishes no KV events, and TensorRT-LLM cannot clear its cache: what it holds when a test begins is
# unknown. It gives no prompt logprobs, and holds back its one end token, not stop tokens. How it dies depends on
# how many GPUs it has.
del test_kv_events_store_the_blocks_of_prompt_and_answer  # noqa: F821
del test_kv_events_never_store_more_blocks_than_the_pool_has  # noqa: F821
del test_clearing_sends_a_cleared_event  # noqa: F821
del test_clearing_drops_prefixes_and_running_requests_go_on  # noqa: F821
del test_cached_tokens_are_reported_once_with_the_first_output  # noqa: F821
del test_every_choice_gets_an_answer  # noqa: F821
del test_prompt_logprobs_are_reported_once_even_for_a_cached_prefix  # noqa: F821
del test_a_prompt_of_one_token_has_no_logprobs  # noqa: F821
del test_no_answer_ends_before_min_tokens  # noqa: F821
del test_the_death_of_an_engine_is_reported_once  # noqa: F821

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def make_engine():
    settings = TrtllmConfig(
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=512,
        kv_block_size=32,
        free_gpu_memory_fraction=0.2,
    )
    return lambda: trtllm.build(MODEL, settings)


async def test_start_returns_the_facts_of_trtllms_configuration(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size) == (512, 32)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert facts.total_kv_blocks > 0
