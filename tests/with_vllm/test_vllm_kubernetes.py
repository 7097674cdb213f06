"""The first article's manifests as typed, on a laptop's cluster, with real vLLM on CPU."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip(
        "vllm and nixl are not installed here: make test-vllm-kubernetes", allow_module_level=True
    )

import kube_articles
import kube_cluster
import vllm_engine
import vllm_models
from kube_articles import ask, run
from waiting import PATIENT_S

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster whose hub cache has a small model under the name of the articles."""
    kube_cluster.find_kubectl()
    if os.geteuid() != 0:
        pytest.skip("two pods on the same port need network namespaces, and those root")
    folder = tmp_path_factory.mktemp("cluster")
    home = kube_articles.make_hub_cache(folder, vllm_models.make(folder / "qwen3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_OFFLINE", "1")
        with kube_cluster.running_cluster(folder, "--backoff-s", "1") as running:
            yield running


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("vllm-agg", ("VllmDecodeWorker",)),
        ("vllm-disagg", ("VllmDecodeWorker", "VllmPrefillWorker")),
    ],
)
def test_manifest_of_the_article_answers_through_port_forward(cluster, name, workers):
    environ = {**vllm_engine.ENVIRONMENT, "DYN_LOG": "debug"}
    text = kube_articles.manifest(name, workers=workers, environ=environ)
    run(cluster, "apply", "-f", "-", stdin=text)
    start_s = 5 * PATIENT_S
    ready = cluster.kubectl(
        *("wait", "--for=condition=Ready", f"dgd/{name}", f"--timeout={start_s:g}s"),
        timeout_s=start_s + PATIENT_S,
    )
    assert ready.returncode == 0, (
        run(cluster, "get", "dgd,pods"),
        cluster.kubectl("logs", f"deployment/{name}-vllmdecodeworker", "--tail=50").stdout,
    )
    with cluster.port_forward(f"svc/{name}-frontend", 8000) as url:
        answers = [ask(url), ask(url, prompt="Tell me of another cat")]
    logs = [run(cluster, "logs", f"deployment/{name}-{worker.lower()}") for worker in workers]
    run(cluster, "delete", f"dgd/{name}")

    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 30
    assert "Qwen/Qwen3-0.6B" in logs[0]
    assert all("New Prefill Request ID" in log for log in logs[1:])
