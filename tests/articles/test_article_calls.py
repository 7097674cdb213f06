"""The calls of the articles, to a frontend and a worker that runs without a model's weights."""

import http.server
import threading
from typing import ClassVar

import httpx
from deployment import MODEL

import ports
from waiting import PATIENT_S, eventually

ARTICLE_MODEL = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
CALL = {
    "model": ARTICLE_MODEL,
    "messages": [{"role": "user", "content": "Hello, how are you?"}],
    "stream": False,
    "max_tokens": 30,
}
PRINTED = {  # the keys of the answers that the articles print, all of which are there
    "id", "choices", "created", "model", "service_tier", "system_fingerprint", "object", "usage"
}  # fmt: skip
# but for `function_call`, which OpenAI's schema does not allow to be null: llm-comply and other strict clients object
PRINTED_MESSAGE = {
    "content", "refusal", "tool_calls", "role", "audio", "reasoning_content"
}  # fmt: skip


def metrics(url):
    return httpx.get(f"{url}/metrics", timeout=PATIENT_S).text


def test_curl_lines_answer_as_printed_and_metrics_have_the_articles_names(deployment):
    flags = ("--speedup-ratio", "100", "--model-name", ARTICLE_MODEL)
    frontend = deployment.frontend("--router-mode", "kv")
    worker = deployment.mocker(*flags)
    frontend.others.append(worker)
    frontend.await_models([ARTICLE_MODEL])
    url = f"{frontend.url}/v1/chat/completions"
    answer = httpx.post(url, json=CALL, timeout=PATIENT_S).json()
    message = answer["choices"][0]["message"]
    history = [*CALL["messages"], message, {"role": "user", "content": "And you?"}]
    bare = httpx.post(
        url,
        content=b"{}",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
        timeout=PATIENT_S,
    )

    assert answer.keys() >= PRINTED
    assert message.keys() == PRINTED_MESSAGE | {"annotations"}
    assert [name for name in PRINTED_MESSAGE if message[name] is None] != []
    assert httpx.post(url, json={**CALL, "messages": history}, timeout=PATIENT_S).status_code == 200
    assert "Content-Type" not in bare.text  # curl's default type is not what is refused
    listed = httpx.get(f"{frontend.url}/v1/models", timeout=PATIENT_S).json()["data"]
    assert [model["id"] for model in listed] == [ARTICLE_MODEL]
    assert "dynamo_frontend_requests_total{" in metrics(frontend.url)
    assert "dynamo_router_kv_cache_hit_ratio{" in metrics(frontend.url)
    eventually(
        lambda: metrics(worker.url).count("dynamo_worker_prefill_latency_ms_bucket{") > 10,
        what="the worker's histogram",
    )
    assert "Prefilling locally for request" in worker.log.read_text()


def test_aggregator_shows_and_pushes_the_load_of_all_workers(deployment):
    frontend = deployment.frontend("--router-mode", "kv", "--router-replica-sync")
    workers = [deployment.mocker("--speedup-ratio", "10") for _ in range(2)]
    frontend.others += workers
    frontend.await_models([MODEL])
    gateway = http.server.HTTPServer(("127.0.0.1", 0), PushGateway)
    threading.Thread(target=gateway.serve_forever, name="push gateway").start()
    try:
        port = ports.reserve()
        flags = ("--component", "backend", "--endpoint", "generate", "--poll-interval", "0.1")
        aggregator = deployment.run("dynamo.metrics", *flags, "--port", str(port))
        gateway_flags = ("--push", "--push-interval", "0.1", "--port", str(gateway.server_port))
        deployment.run("dynamo.metrics", *flags, *gateway_flags, "--model-name", MODEL)
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: "metrics at" in aggregator.log.read_text(), what="the aggregator")

        def has_both_workers() -> bool:
            return metrics(url).count("llm_kv_blocks_total{") == 2

        eventually(has_both_workers, what="the load of both workers")

        def is_counted() -> bool:
            assert frontend.chat("Tell me. " * 50, max_tokens=1).status_code == 200
            return "llm_kv_hit_rate_isl_blocks_total{" in metrics(url)

        eventually(is_counted, what="the prompt blocks that the router publishes")
        labels = 'component="backend",endpoint="generate"'
        for name in ("kv_blocks_active", "requests_active_slots", "requests_total_slots"):
            assert metrics(url).count(f"llm_{name}{{{labels},worker_id=") == 2
        assert metrics(url).count(f"llm_kv_hit_rate_percent{{{labels},worker_id=") == 2
        assert f"llm_load_avg{{{labels}}} " in metrics(url)
        assert f"llm_load_std{{{labels}}} " in metrics(url)

        def pages_with_both_workers() -> list[tuple[str, str]]:
            """The first pages are pushed before the workers are found."""
            return [
                each for each in PushGateway.pages if each[1].count("llm_kv_blocks_total{") == 2
            ]

        eventually(pages_with_both_workers, what="the load of both workers at the push gateway")
        path, page = pages_with_both_workers()[-1]
        assert path == "/metrics/job/dynamo"
        assert f'llm_load_avg{{{labels},model="{MODEL}"}}' in page
        workers[0].kill()
        eventually(
            lambda: metrics(url).count("llm_kv_blocks_total{") == 1, what="only the living worker"
        )
    finally:
        gateway.shutdown()
        gateway.server_close()


class PushGateway(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent, as Prometheus's push gateway does."""

    pages: ClassVar[list[tuple[str, str]]] = []

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.pages.append((self.path, body.decode()))
        self.send_response(202)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""
