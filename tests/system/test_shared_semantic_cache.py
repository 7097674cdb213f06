"""A semantic cache in Milvus that the processes of a frontend share, and the one that follows it."""

import re

import httpx
import pytest
from deployment import MODEL

import milvus_server
from waiting import PATIENT_S, eventually

CONFIG = f"""
default_model: {MODEL}
keyword_rules: [{{name: capital, keywords: [capital]}}]
decisions:
  - name: capitals
    rules: {{conditions: [{{type: keyword, name: capital}}]}}
    modelRefs: [{{model: {MODEL}}}]
    plugins: [{{type: semantic-cache, configuration: {{}}}}]
semantic_cache:
  enabled: true
  backend_type: milvus
  milvus:
    connection: {{host: 127.0.0.1, port: PORT, timeout: {PATIENT_S}}}
    lookup_timeout_seconds: {PATIENT_S}
"""
TEXT, REPHRASED = "What is the capital of France?", "Please tell me the capital of France"
OPERATION = r'llm_cache_operations_total\{.*operation="%s",status="%s"\} [1-9]'
READY = r'model_ready\{http_worker="\d".*\} 1.0'


@pytest.fixture
def server(tmp_path):
    server = milvus_server.MilvusServer(tmp_path / "milvus")
    server.start()
    yield server
    server.stop()


def ask(frontend, text):
    """Return the answer to a question, on a connection of its own: any of the processes may get it."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "auto", "messages": messages, "stop": ["France"]}  # a whole answer
    url = f"{frontend.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=PATIENT_S)
    assert answer.status_code == 200
    return answer


def processes(frontend, pattern):
    """Return the number of processes whose metrics have such a line."""
    try:
        text = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
    except httpx.TransportError:
        return 0
    return len(re.findall(pattern, text))


def start(deployment, config):
    frontend = deployment.frontend("--http-workers", "2", "--semantic-router", str(config))
    for pattern in (READY, OPERATION % ("connect", "success")):
        eventually(lambda wanted=pattern: processes(frontend, wanted) == 2, what=pattern)
    return frontend


def test_processes_share_answers_and_the_next_ones_have_them(deployment, tmp_path, server):
    config = tmp_path / "router.yaml"
    config.write_text(CONFIG.replace("PORT", str(server.port)))
    worker = deployment.mocker("--speedup-ratio", "0", "--echo")
    first = start(deployment, config)
    first.others = [worker]
    missed = ask(first, TEXT)
    eventually(
        lambda: processes(first, OPERATION % ("put", "success")), what="the answer is stored"
    )

    answers = [ask(first, REPHRASED) for _ in range(24)]
    first.end()
    restarted = start(deployment, config)
    answers.append(ask(restarted, TEXT))
    server.stop()

    assert "x-vsr-cache-hit" not in missed.headers
    assert {answer.headers.get("x-vsr-cache-hit") for answer in answers} == {"true"}
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert texts == {missed.json()["choices"][0]["message"]["content"]}
    assert ask(restarted, "What is the capital of Chile?").status_code == 200
