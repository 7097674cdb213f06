"""`dynamo serve A B`, as a user meets it: models that are loaded when they are asked for."""

import shutil
from concurrent import futures

import httpx
import pytest

import ports
from dynamo.engine import native
from dynamo.launch import state
from waiting import PATIENT_S, eventually


@pytest.fixture
def models(tmp_path):
    """Two copies of the built-in model."""
    paths = [tmp_path / name for name in ("alpha", "beta")]
    for path in paths:
        shutil.copytree(f"{native.__path__[0]}/storyteller", path)
    return [str(path) for path in paths]


@pytest.fixture
def started(deployment, tmp_path, monkeypatch):
    """Start `dynamo serve`, and return its process and its URL."""
    monkeypatch.setenv(state.HOME_VARIABLE, str(tmp_path / "home"))
    deployment.environ[state.HOME_VARIABLE] = str(tmp_path / "home")

    def start(*flags):
        port = ports.reserve()
        process = deployment.run("dynamo.cli", "serve", "--http-port", str(port), *flags)
        eventually(
            lambda: "curl " in process.log.read_text() or not process.is_running, what="a start"
        )
        return process, f"http://127.0.0.1:{port}/v1"

    return start


def num_workers(url):
    listed = httpx.get(f"{url}/models", timeout=PATIENT_S).json()["data"]
    return {row["id"]: row["num_workers"] for row in listed}


def ask(url, model):
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=PATIENT_S)


def test_pinned_model_is_loaded_at_once_and_another_one_by_its_first_requests(started, models):
    process, url = started(
        *models, "--engine", "mocker", "--memory-budget-gb", "4", "--pin", "alpha"
    )
    eventually(lambda: num_workers(url) == {"alpha": 1, "beta": 0}, what="the pinned model")
    eventually(lambda: state.find(None).models.get("alpha") == "loaded, pinned", what="its state")
    before = state.find(None)
    with futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, [url] * 3, ["beta"] * 3))
    eventually(lambda: state.find(None).models.get("beta") == "loaded", what="the other model")

    assert [each.name for each in before.processes] == ["frontend", "alpha"]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert process.log.read_text().count("dynamo: beta is loading") == 1
    assert [each.name for each in state.find(None).processes] == ["frontend", "alpha", "beta"]


def test_model_that_cannot_be_loaded_says_why(started, models, tmp_path):
    (tmp_path / "beta" / "model.safetensors").write_bytes(b"no weights")
    _, url = started(*models, "--memory-budget-gb", "4")
    answer = ask(url, "beta")

    assert answer.status_code == 503
    assert "'beta' could not be loaded: beta exited with" in answer.json()["error"]["message"]
