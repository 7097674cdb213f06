"""The calls of the articles, to a frontend and a worker that runs without a model's weights."""

import httpx

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
