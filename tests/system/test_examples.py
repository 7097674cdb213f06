"""The examples of several models, a router, an engine and a collector of one's own, as their READMEs start them."""

import os
import pathlib

import httpx
from deployment import newly_asked

import ports
from waiting import PATIENT_S, eventually

NAMES = ("http-request", "preprocess", "handle_payload", "prefill", "decode")  # of spans
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def ask(url, model, text, **fields):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENT_S).json()


def test_two_models_answer_behind_one_frontend(deployment):
    port = ports.reserve()
    served = deployment.run_in(
        EXAMPLES / "multi_model", "dynamo.cli", "serve", "multi_model:Frontend",
        *("-f", "config.yaml", f"--Frontend.port={port}"),
        "--SmallModel.ServiceArgs.module=dynamo.mocker",
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def has_both() -> bool:
        served.check()
        try:
            listed = httpx.get(f"{url}/v1/models", timeout=PATIENT_S).json()["data"]
        except httpx.TransportError:
            return False
        return {model["id"] for model in listed} == {"small", "large"}

    eventually(has_both, what="both models")

    assert ask(url, "small", "Hello", max_tokens=2)["model"] == "small"
    assert ask(url, "large", "Hello", max_tokens=2)["model"] == "large"


def test_policy_of_ones_own_keeps_long_prompts_at_one_worker(deployment):
    workers = [deployment.mocker("--speedup-ratio", "1000") for _ in range(2)]
    path = os.pathsep.join(
        [str(EXAMPLES / "custom_router"), deployment.environ.get("PYTHONPATH", "")]
    )
    deployment.environ["PYTHONPATH"] = path
    frontend = deployment.frontend("--router-mode", "kv", "--router-policy", "by_length:ByLength")
    frontend.others += workers
    frontend.await_workers(2)

    def asked_by(text):
        with newly_asked(workers) as asked:
            assert frontend.chat(text, max_tokens=1).status_code == 200
            return asked()

    long, short = asked_by("Tell me a story. " * 300), asked_by("Hello")
    assert long is not short
    assert [asked_by(f"{n} says hello. " * 300) for n in range(3)] == [long] * 3
    assert [asked_by(f"{n}") for n in range(3)] == [short] * 3


def test_engine_of_ones_own_answers(deployment):
    frontend = deployment.frontend()
    worker = deployment.run_in(EXAMPLES / "custom_engine", "echo", "--model-name", "echo")
    frontend.others.append(worker)
    frontend.await_models(["echo"])

    answer = ask(frontend.url, "echo", "The cat sleeps.", n=2)
    cut = ask(frontend.url, "echo", "The cat sleeps.", max_tokens=2)

    assert all("The cat sleeps." in choice["message"]["content"] for choice in answer["choices"])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 2


def test_spans_of_a_request_are_shown_as_a_tree(deployment):
    port = ports.reserve()
    shown = deployment.run_in(EXAMPLES / "traces", "show", "--port", str(port), "--quiet", "1")
    deployment.environ |= {
        "OTEL_EXPORT_ENABLED": "1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{port}/v1/traces",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    frontend = deployment.frontend()
    frontend.others += [shown, deployment.mocker("--speedup-ratio", "1000")]
    frontend.await_models(["storyteller"])
    eventually(lambda: "listening on" in shown.log.read_text(), what="the collector listens")
    assert frontend.chat("Hello", max_tokens=2).status_code == 200
    eventually(lambda: " decode" in shown.log.read_text(), what="the trace is shown")
    rows = shown.log.read_text().split("\n")
    indent = {
        name: next(row.find(name) for row in rows if row.endswith(f" {name}")) for name in NAMES
    }

    assert indent["preprocess"] == indent["handle_payload"] == indent["http-request"] + 2
    assert indent["prefill"] == indent["decode"] == indent["handle_payload"] + 2
    assert sum(row.startswith("trace ") for row in rows) == 1
