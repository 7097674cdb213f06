"""The planner scales real vLLM workers under streams: 2 -> 1 -> 2, and no answer is cut.

Three starts of an engine take minutes, so it has a target of its own: `make test-vllm-planner`.
"""

import concurrent.futures
import importlib.util
import os
import threading

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

from deployment import Deployment
from planners import Planner, stream_to_the_end

import vllm_models
from waiting import eventually

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("DYN_TEST_PLANNER") != "1", reason="takes minutes: make test-vllm-planner"
    ),
]
MODEL = "qwen3-tiny"
NUM_TOKENS, NUM_STREAMS = 300, 6
START_S = 600.0  # on a busy machine; usually half a minute
WORKER = (
    "--enforce-eager --dtype float32 --block-size 32 --num-gpu-blocks-override 80"
    " --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 512"
)
SCALING = (
    "--adjustment-interval", "0.5", "--scale-down-delay", "1", "--max-workers", "2",
    "--decode-kv-scale-up-threshold", "0.25", "--decode-kv-scale-down-threshold", "0.15",
    "--startup-time", "600",
)  # fmt: skip


@pytest.fixture
def deployment(tmp_path):
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.end()


def test_vllm_workers_go_and_come_under_streams_and_no_answer_is_cut(deployment, tmp_path):
    deployment.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    frontend = deployment.frontend()
    model = str(vllm_models.make(tmp_path / "model"))
    flags = ("--model", model, "--worker-flags", WORKER, *SCALING)
    planner = Planner(deployment, frontend, *flags, backend="vllm", model=MODEL)
    frontend.await_models([MODEL], within_s=START_S)
    may_run = [threading.Event() for _ in range(NUM_STREAMS)]
    is_over = threading.Event()

    def stream(number):
        answers = []
        while not is_over.is_set():
            if may_run[number].wait(0.1):
                answers.append(stream_to_the_end(frontend, MODEL, NUM_TOKENS))
        return answers

    def stream_until(num_streams, num_workers):
        for number, event in enumerate(may_run):
            event.set() if number < num_streams else event.clear()
        eventually(
            lambda: planner.metric("num_decode_replicas") == num_workers,
            within_s=START_S,
            what=f"{num_workers} workers serve {num_streams} streams: {planner.decisions()[:2]}",
        )

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, number) for number in range(NUM_STREAMS)]
        try:
            for num_workers in (2, 1, 2):
                stream_until(NUM_STREAMS if num_workers == 2 else 1, num_workers)
        finally:
            is_over.set()
        answers = [answer for each in streams for answer in each.result()]

    assert set(answers) == {(NUM_TOKENS, "[DONE]")}
