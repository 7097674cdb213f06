"""The graph of the third article over real vLLM, `graphs.disagg_router:Frontend` with `configs/disagg_router.yaml`.

It starts two vLLM workers on a CPU and takes about a minute, so it has a target of its own: `make test-vllm-graph`.
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


def test_disaggregated_graph_answers_the_curl_of_the_article(deployment, tmp_path):
    port = ports.reserve()
    values = yaml.safe_load((EXAMPLE / "configs" / "disagg_router.yaml").read_text())
    model = vllm_models.make(tmp_path / "model")
    values["Common"] |= {"model": str(model), "max-model-len": 1024}  # what a CPU can hold
    values["Frontend"]["port"] = port
    for worker in ("VllmWorker", "PrefillWorker"):
        values[worker] |= {"dtype": "float32", "num-gpu-blocks-override": 200}
    file = tmp_path / "disagg_router.yaml"
    file.write_text(yaml.safe_dump(values))
    served = deployment.run_in(
        EXAMPLE, "dynamo.cli", "serve", "graphs.disagg_router:Frontend", "-f", str(file)
    )
    eventually(
        lambda: "answers at" in served.log.read_text() or not served.is_running,
        within_s=START_S,
        what="the graph answers",
    )
    assert served.is_running, served.log.read_text()
    url = f"http://127.0.0.1:{port}"

    def has_both_workers() -> bool:
        served.check()
        page = httpx.get(f"{url}/console/api/topology", timeout=PATIENT_S).json()
        return page["num_by_role"] == {"decode": 1, "prefill": 1}

    eventually(has_both_workers, within_s=START_S, what="a prefill and a decode worker")
    answer = httpx.post(f"{url}/v1/chat/completions", json=CALL, timeout=PATIENT_S)
    row = httpx.get(f"{url}/console/api/requests", timeout=PATIENT_S).json()["rows"][0]

    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == NAME
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["completion_tokens"] > 0
    assert "Prefilling remotely for request" in served.log.read_text()
    assert row["state"] == "done"
