"""What every engine promises its host, over real vLLM.

Without vLLM all of this is skipped: `make test-vllm` makes an environment that has it.
"""

import importlib.util
import multiprocessing
import os
import signal

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import psutil

from engine_suite import *  # noqa: F403 (the suite's tests, which pytest finds here)
from salt_suite import *  # noqa: F403 (the same)
from sleeper_suite import *  # noqa: F403 (likewise)
from vllm_engine import *  # noqa: F403 (its fixtures)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def break_down():
    def kill_core(engine):
        children = multiprocessing.active_children()  # the shared engine has some, too
        newest = max(children, key=lambda child: psutil.Process(child.pid).create_time())
        os.kill(newest.pid, signal.SIGKILL)
        return "vLLM's engine process died"

    return kill_core


@pytest.fixture
def sleeper(shared):
    """vLLM refuses --enable-sleep-mode on a CPU, where its worker does all of it but for the memory."""
    engine = getattr(shared[0], "_engine", shared[0])  # without what moves blocks
    assert engine.capabilities.sleep is None
    return engine._library


async def test_only_dropped_weights_are_reloaded(sleeper, monkeypatch):
    asked, llm = [], sleeper._llm
    pass_on = llm.collective_rpc

    async def noted(method):
        asked.append(method)
        return await pass_on(method)

    monkeypatch.setattr(llm, "collective_rpc", noted)
    await sleeper.sleep(1)
    await sleeper.wake_up([])
    assert asked == []

    await sleeper.sleep(2)
    await sleeper.wake_up(["kv_cache"])
    assert asked == []

    await sleeper.wake_up(["weights"])
    assert asked == ["reload_weights"]


async def test_start_returns_the_facts_of_vllms_configuration(host):
    facts = host.facts

    assert (facts.context_length, facts.kv_block_size, facts.total_kv_blocks) == (512, 32, 24)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (8, 64)
    assert facts.supports_guided
    assert not facts.supports_thinking_limit  # it has no reasoning parser
