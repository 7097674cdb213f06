"""The encoders in a process of their own, beside the router's process and a frontend."""

import re

import httpx
import msgspec
import pytest
from deployment import MODEL

import checkpoints
import ports
import tokenizer_files
from waiting import PATIENT_S, eventually

WORDS = ["good", "bad", "word"]
CONFIG = f"""
default_model: {MODEL}
prompt_guard: {{enabled: true, threshold: 1.0, on_error: block, model_id: attack}}
bert_model: {{model_id: sentences}}
tools: {{enabled: true, tools_db_path: tools.json}}
embedding_rules: [{{name: rude, threshold: 0.99, candidates: [bad word]}}]
decisions:
  - name: rude_decision
    rules: {{conditions: [{{type: embedding, name: rude}}]}}
    modelRefs: [{{model: {MODEL}}}]
"""


@pytest.fixture
def config(tmp_path):
    """Return a configuration whose guard and embeddings are encoders with random weights."""
    checkpoints.make_classifier(tmp_path / "attack", "modernbert", "sequence", ("benign", "attack"))
    (tmp_path / "attack" / "tokenizer.json").write_text(tokenizer_files.wordpiece(WORDS))
    checkpoints.make_encoder(tmp_path / "sentences", "bert")
    (tmp_path / "sentences" / "tokenizer.json").write_text(tokenizer_files.wordpiece(WORDS))
    tool = {"type": "function", "function": {"name": "soap", "description": "bad word"}}
    (tmp_path / "tools.json").write_bytes(msgspec.json.encode([{"tool": tool}]))
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG)
    return path


def test_router_and_frontend_ask_the_encoder_and_block_when_it_is_gone(deployment, config):
    system_port = ports.reserve()
    encoder = deployment.run(
        "dynamo.semantic_encoder", "--config", str(config), "--system-port", str(system_port)
    )
    frontend = deployment.frontend("--semantic-router", str(config))
    frontend.others = [deployment.mocker("--speedup-ratio", "0"), encoder]
    api_port, *others = (ports.reserve() for _ in range(3))
    flags = (
        "--api-port",
        str(api_port),
        "--port",
        str(others[0]),
        "--metrics-port",
        str(others[1]),
    )
    deployment.run("dynamo.semantic_router", "--config", str(config), *flags)
    frontend.await_models([MODEL, "MoM"])

    def ask_router():
        url = f"http://127.0.0.1:{api_port}/api/v1/classify/security"
        try:
            return httpx.post(url, json={"text": "bad word"}, timeout=PATIENT_S)
        except httpx.HTTPError:
            return httpx.Response(502)

    def ask_frontend():
        body = {
            "model": "auto",
            "messages": [{"role": "user", "content": "bad word"}],
            "tool_choice": "auto",
        }
        url = f"{frontend.url}/v1/chat/completions"
        return httpx.post(url, json={**body, "max_tokens": 3}, timeout=PATIENT_S)

    eventually(lambda: ask_router().status_code == 200, what="the encoder's answer")
    eventually(
        lambda: "x-vsr-jailbreak-blocked" not in ask_frontend().headers, what="a request passes"
    )
    headers = ask_frontend().headers
    assert headers["x-vsr-matched-embeddings"] == "rude"
    assert headers["x-vsr-selected-tools"] == "soap"
    assert headers["x-vsr-selected-decision"] == "rude_decision"
    risk = ask_router().json()["risk_score"]
    assert 0 < risk < 1
    system = f"http://127.0.0.1:{system_port}"
    assert httpx.get(f"{system}/live", timeout=PATIENT_S).status_code == 200
    assert httpx.get(f"{system}/health", timeout=PATIENT_S).json()["status"] == "ready"
    metrics = httpx.get(f"{system}/metrics", timeout=PATIENT_S).text
    (count,) = re.findall(r"\ndynamo_component_requests_total{.*} (\d+)", metrics)
    assert int(count) >= 3
    encoder.kill()
    eventually(lambda: ask_router().status_code == 503, what="the router misses the encoder")
    eventually(
        lambda: ask_frontend().headers.get("x-vsr-jailbreak-blocked") == "true",
        what="the frontend blocks without its guard",
    )
