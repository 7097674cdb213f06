"""The graphs of examples/llm over real vLLM, each with its file of configuration.

The third article starts the last. Each starts one or two vLLM workers on a CPU and takes about a minute, so they have a
target of their own: `make test-vllm-graph`.
"""

import importlib.util
import os
import pathlib

import httpx
import pytest
import yaml

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("vllm and nixl are not installed here: make test-vllm", allow_module_level=True)

from deployment import Deployment

import ports
import vllm_models
from waiting import PATIENT_S, eventually

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llm"
START_S = 600.0  # on a busy machine
NAME = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
CALL = {  # the article's
    "model": NAME,
    "messages": [{"role": "user", "content": "Hello, how are you?"}],
    "stream": False,
    "max_tokens": 300,
}

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("DYN_TEST_GRAPH") != "1", reason="takes a minute: make test-vllm-graph"
    ),
]


@pytest.fixture
def deployment(tmp_path):
    deployment = Deployment(tmp_path)
    deployment.environ["DYN_LOG"] = "debug"  # which says where a prompt is computed
    deployment.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    yield deployment
    deployment.end()


WORKERS_BY_GRAPH = {
    "agg": {"aggregated": 1},
    "agg_router": {"aggregated": 2},
    "disagg": {"decode": 1, "prefill": 1},
    "disagg_router": {"decode": 1, "prefill": 1},
    "agg_planner": {"aggregated": 1},  # which the planner starts
}


def write_config(graph, folder, port):
    """Write the graph's configuration for a small model that a CPU can hold, and return the file."""
    values = yaml.safe_load((EXAMPLE / "configs" / f"{graph}.yaml").read_text())
    model = vllm_models.make(folder / "model")
    values["Common"] |= {"model": str(model), "max-model-len": 1024}
    values["Frontend"]["port"] = port
    for worker in {"VllmWorker", "PrefillWorker"} & {*values}:
        values[worker] |= {"dtype": "float32", "num-gpu-blocks-override": 200}
    if "Planner" in values:
        values["Planner"] |= {"adjustment-interval": 1, "startup-time": START_S}
    file = folder / f"{graph}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize("graph", WORKERS_BY_GRAPH)
def test_graph_answers_the_curl_of_the_article(deployment, tmp_path, graph):
    port = ports.reserve()
    file = write_config(graph, tmp_path, port)
    served = deployment.run_in(
        EXAMPLE, "dynamo.cli", "serve", f"graphs.{graph}:Frontend", "-f", str(file)
    )
    eventually(
        lambda: "answers at" in served.log.read_text() or not served.is_running,
        within_s=START_S,
        what="the graph answers",
    )
    assert served.is_running, served.log.read_text()
    url = f"http://127.0.0.1:{port}"
    expected = WORKERS_BY_GRAPH[graph]

    def has_all_workers() -> bool:
        served.check()
        page = httpx.get(f"{url}/console/api/topology", timeout=PATIENT_S).json()
        return page["num_by_role"] == expected

    eventually(has_all_workers, within_s=START_S, what=f"the workers {expected}")
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=CALL, headers={"x-dynamo-explain": "1"}, timeout=START_S
    )
    row = httpx.get(f"{url}/console/api/requests", timeout=PATIENT_S).json()["rows"][0]

    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == NAME
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] > 0
    is_remote = "Prefilling remotely for request" in served.log.read_text()
    assert is_remote == ("prefill" in expected)
    reasons = [decision.get("reason", "") for decision in body["nvext"]["explanation"]]
    assert reasons
    assert any("round-robin" in reason for reason in reasons) != graph.endswith("_router")
    assert row["state"] == "done"
    planners = httpx.get(f"{url}/console/api/planner", timeout=PATIENT_S).json()["planners"]
    present = [planner["decisions"][0]["present"] for planner in planners]
    assert present == ([{"prefill": 0, "decode": 1}] if graph == "agg_planner" else [])
