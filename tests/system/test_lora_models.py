"""LoRA adapters are models to clients: real processes, simulated engines that pretend to have some."""

import concurrent.futures
import itertools
import threading

import anthropic
import httpx
import openai
import pytest
from deployment import MODEL
from split import ALWAYS, CONNECTED

from waiting import PATIENT_S, eventually

QUESTION = "Tell me a story about a brave cat"
SAY = [{"role": "user", "content": QUESTION}]
AT_ONCE = ("--speedup-ratio", "0", "--block-size", "16")


@pytest.fixture(params=["round-robin", "kv"])
def story(deployment, request):
    """A frontend, a worker, and one that has two adapters."""
    plain = deployment.mocker(*AT_ONCE)
    poet = deployment.mocker(*AT_ONCE, "--lora-names", "poet,clerk")
    frontend = deployment.frontend("--router-mode", request.param)
    frontend.others = [plain, poet]
    frontend.await_models(["clerk", "poet", MODEL])
    eventually(lambda: num_instances(frontend) == 2, what="two workers")
    return frontend, plain, poet


def num_instances(frontend):
    return len(httpx.get(f"{frontend.url}/health", timeout=PATIENT_S).json()["instances"])


def said(answer):
    """Who says that it answered, and what."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["model"], body["choices"][0]["message"]["content"]


def test_adapter_is_listed_until_its_last_worker_leaves(story):
    frontend, plain, poet = story
    listed = httpx.get(f"{frontend.url}/v1/models", timeout=PATIENT_S).json()["data"]
    answers = {
        model: {said(frontend.chat(QUESTION, model=model, max_tokens=9)) for _ in range(4)}
        for model in (MODEL, "poet", "clerk")
    }
    unknown = frontend.chat(QUESTION, model="singer")
    poet.kill()
    frontend.others = [plain]
    frontend.await_models([MODEL])
    lost = frontend.chat(QUESTION, model="poet")
    after = said(frontend.chat(QUESTION, model=MODEL, max_tokens=9))

    assert {one["id"]: one.get("parent") for one in listed} == {
        "clerk": MODEL,
        "poet": MODEL,
        MODEL: None,
    }
    assert [{name for name, _ in told} for told in answers.values()] == [
        {MODEL},
        {"poet"},
        {"clerk"},
    ]
    texts = [{text for _, text in told} for told in answers.values()]
    assert all(len(one) == 1 for one in texts)
    assert len(set.union(*texts)) == 3  # each answers in its own way: its name came to the engine
    assert unknown.status_code == 404
    assert lost.status_code == 503
    assert after in answers[MODEL]


def test_adapter_answers_the_client_of_each_api(story):
    frontend, _, _ = story
    open_ai = openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none")
    claude = anthropic.Anthropic(base_url=frontend.url, api_key="none")
    with open_ai, claude:
        chat = open_ai.chat.completions.create(model="poet", messages=SAY, max_tokens=9)
        message = claude.messages.create(model="poet", messages=SAY, max_tokens=9)
        response = open_ai.responses.create(model="poet", input=QUESTION, max_output_tokens=9)
        tensors = httpx.post(
            f"{frontend.url}/v2/models/poet/generate",
            json={"text_input": QUESTION},
            timeout=PATIENT_S,
        ).json()
        shown = open_ai.models.retrieve("poet")
    text = chat.choices[0].message.content

    assert text
    assert [message.content[0].text, response.output_text] == [text, text]
    assert [chat.model, message.model, response.model, shown.id] == ["poet"] * 4
    assert tensors["model_name"] == "poet"


def test_adapter_is_routed_by_its_own_prefixes(deployment):
    deployment.mocker(*AT_ONCE, "--lora-names", "poet,clerk")
    deployment.mocker(*AT_ONCE, "--lora-names", "poet")
    frontend = deployment.frontend("--router-mode", "kv")
    frontend.await_models(["clerk", "poet", MODEL])
    eventually(lambda: num_instances(frontend) == 2, what="two workers")

    def num_cached(model):
        body = {"model": model, "prompt": QUESTION * 20, "max_tokens": 1}
        answer = httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=PATIENT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def foretold():
        """The sum of the shares of prompts that the router believed to be cached."""
        text = httpx.get(f"{frontend.url}/metrics", timeout=PATIENT_S).text
        rows = [row for row in text.splitlines() if "_router_kv_hit_rate_sum{" in row]
        return sum(float(row.rpartition(" ")[2]) for row in rows)

    def is_foretold(model):
        before = foretold()
        return num_cached(model) and foretold() > before

    assert [num_cached(model) for model in ("poet", "clerk", MODEL)] == [0, 0, 0]
    assert foretold() == 0
    for model in ("poet", "clerk", MODEL):
        eventually(lambda name=model: is_foretold(name), what=f"{model}'s prefix")


@pytest.mark.parametrize("mode", ["round-robin", "kv"], ids=["by the worker", "by the frontend"])
def test_prefill_worker_with_the_adapter_computes_its_prompt(deployment, mode):
    flags = (*AT_ONCE, "--lora-names", "poet")
    frontend = deployment.frontend("--router-mode", mode, *(ALWAYS if mode == "kv" else ()))
    prefill = deployment.mocker(*flags, "--is-prefill-worker")
    decode = deployment.mocker(*flags, "--disaggregation-mode", "decode", *ALWAYS)
    frontend.others = [prefill, decode]
    frontend.await_models(["poet", MODEL])
    eventually(
        lambda: (
            CONNECTED.search(decode.log.read_text())
            and (mode != "kv" or "by prefill workers of" in frontend.log.read_text())
        ),
        what="prompts go by the prefill worker",
    )
    names = [said(frontend.chat(QUESTION * 20, model=model))[0] for model in ("poet", MODEL)]

    assert names == ["poet", MODEL]
    assert prefill.metric("requests_total") == 2
    assert decode.metric('prefills_total{where="remote"}') == 2
    assert decode.metric('prefills_total{where="fallback"}') == 0


def tell(worker, method, path="", **body):
    return httpx.request(
        method, f"{worker.url}/v1/loras{path}", json=body or None, timeout=PATIENT_S
    )


def load(worker, name, directory):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    return tell(worker, "POST", lora_name=name, source={"uri": directory.as_uri()})


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_adapters_are_loaded_and_unloaded_under_load(deployment, tmp_path, mode):
    one, other = (deployment.mocker(*AT_ONCE) for _ in range(2))
    frontend = deployment.frontend("--router-mode", mode)
    frontend.others = [one, other]
    frontend.await_models([MODEL])
    eventually(lambda: num_instances(frontend) == 2, what="two workers")
    plain = said(frontend.chat(QUESTION, model=MODEL, max_tokens=9))

    loaded = load(one, "a/poet", tmp_path / "poet")
    answers = {said(frontend.chat(QUESTION, model="a/poet", max_tokens=9)) for _ in range(4)}
    shown = tell(one, "GET").json()
    unloaded = tell(one, "DELETE", "/a/poet")
    frontend.await_models([MODEL])
    lost = frontend.chat(QUESTION, model="a/poet")

    assert loaded.json() == {
        "status": "success",
        "message": "LoRA adapter 'a/poet' is loaded",
        "lora_name": "a/poet",
        "lora_id": 1,
    }
    assert shown == {"status": "success", "loras": {"a/poet": 1}, "count": 1}
    assert len(answers) == 1
    assert plain not in answers
    assert unloaded.status_code == 200
    assert lost.status_code == 404
    assert said(frontend.chat(QUESTION, model=MODEL, max_tokens=9)) == plain
    assert tell(one, "DELETE", "/a/poet").status_code == 404
    assert load(other, MODEL, tmp_path / "model").status_code == 409


def test_adapter_can_be_asked_for_when_its_load_has_answered(deployment, tmp_path):
    worker, frontend = deployment.mocker(*AT_ONCE), deployment.frontend()
    frontend.others = [worker]
    frontend.await_models([MODEL])
    codes = []
    for number in range(8):
        name = f"poet-{number}"
        assert load(worker, name, tmp_path / name).status_code == 200
        codes.append(frontend.chat(QUESTION, model=name, max_tokens=9).status_code)

    assert codes == [200] * 8


def test_adapter_on_both_workers_is_prefilled_by_one_and_decoded_by_the_other(deployment, tmp_path):
    frontend = deployment.frontend()
    prefill = deployment.mocker(*AT_ONCE, "--is-prefill-worker")
    decode = deployment.mocker(*AT_ONCE, "--disaggregation-mode", "decode", *ALWAYS)
    frontend.others = [prefill, decode]
    frontend.await_models([MODEL])
    connected = lambda: CONNECTED.findall(decode.log.read_text())  # noqa: E731
    eventually(connected, what="prompts go by the prefill worker")

    load(decode, "poet", tmp_path / "poet")
    frontend.await_models(["poet", MODEL])
    said(frontend.chat(QUESTION * 20, model="poet"))
    elsewhere = 'prefills_total{where="remote"}'
    before = decode.metric(elsewhere)
    load(prefill, "poet", tmp_path / "poet")

    numbers = itertools.count()

    def goes_by_the_prefill_worker():  # with a question that no cache knows
        said(frontend.chat(f"{next(numbers)} {QUESTION * 20}", model="poet"))
        return decode.metric(elsewhere) >= 1

    eventually(goes_by_the_prefill_worker, what="the adapter at the prefill worker")
    assert before == 0
    assert len(connected()) == 1  # nobody had to connect again


def test_sleeping_worker_loads_no_adapter(deployment, tmp_path):
    worker, frontend = deployment.mocker(*AT_ONCE), deployment.frontend()
    frontend.others = [worker]
    frontend.await_models([MODEL])
    httpx.post(f"{worker.url}/engine/sleep", timeout=PATIENT_S)
    frontend.await_models([])

    refused = load(worker, "poet", tmp_path / "poet")
    httpx.post(f"{worker.url}/engine/wake_up", timeout=PATIENT_S)
    frontend.await_models([MODEL])

    assert refused.status_code == 409
    assert "try again" in refused.json()["error"]["message"]
    assert load(worker, "poet", tmp_path / "poet").status_code == 200
    frontend.await_models(["poet", MODEL])


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_unloading_an_adapter_at_one_of_two_workers_fails_no_request(deployment, tmp_path, mode):
    one, other = (deployment.mocker(*AT_ONCE, "--lora-names", "poet") for _ in range(2))
    frontend = deployment.frontend("--router-mode", mode)
    frontend.others = [one, other]
    frontend.await_models(["poet", MODEL])
    eventually(lambda: num_instances(frontend) == 2, what="two workers")
    is_over = threading.Event()

    def ask_on():
        with httpx.Client(base_url=frontend.url, timeout=PATIENT_S) as client:
            body = {"model": "poet", "prompt": QUESTION, "max_tokens": 2}
            statuses = []
            while not is_over.is_set() or len(statuses) < 2:
                statuses.append(client.post("/v1/completions", json=body).status_code)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask_on) for _ in range(4)]
        told = []
        for _ in range(6):
            told.append(tell(one, "DELETE", "/poet").status_code)
            told.append(load(one, "poet", tmp_path / "poet").status_code)
        is_over.set()
        statuses = [status for each in asking for status in each.result()]

    assert told == [200] * 12
    assert len(statuses) > 4
    assert set(statuses) == {200}
