"""The process of the encoders, asked over the request plane of memory."""

import asyncio
import dataclasses
import functools
import json
import threading

import httpx
import pytest
import safetensors.torch
import torch
import transformers

import checkpoints
import tokenizer_files
from dynamo.base import clock, errors, tasks
from dynamo.cli import semantic as command
from dynamo.engine.native import runner
from dynamo.gateway import api
from dynamo.observability import metrics
from dynamo.protocols import encoders, instances
from dynamo.runtime import component
from dynamo.runtime.http import server
from dynamo.semantic import encoder_client, encoder_scores, service
from dynamo.worker import classifier_set, health, semantic_encoder
from semantic_configs import chat
from waiting import PATIENT_S, until

WORDS = ["good", "bad", "ann", "##s", *(f"word{n}" for n in range(300))]
LABELS = {
    "domain": ("law", "other"),
    "attack": ("benign", "jailbreak"),
    "pii": ("O", "B-PERSON", "I-PERSON"),
}
CONFIG = """
default_model: general
model_config: {general: {}, lawyer: {}}
classifier: {category_model: {model_id: domain}, pii_model: {model_id: pii}}
decisions:
  - name: law_decision
    rules: {conditions: [{type: domain, name: law}]}
    modelRefs: [{model: lawyer}]
prompt_guard: {enabled: true, threshold: 1.0, on_error: block, model_id: attack}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a configuration and its three models, with random weights."""
    made = tmp_path_factory.mktemp("models")
    for name, labels in LABELS.items():
        task = "token" if name == "pii" else "sequence"
        checkpoints.make_classifier(made / name, "bert", task, labels)
        (made / name / "tokenizer.json").write_text(tokenizer_files.wordpiece(WORDS))
    (made / "router.yaml").write_text(CONFIG)
    return made


class EncoderProcess:
    """The encoders at the endpoint of an in-memory runtime."""

    def __init__(self, directory, cluster, **options):
        path = str(directory / "router.yaml")
        self.settings = semantic_encoder.SemanticEncoderConfig(router_config=path, **options)
        self._cluster = cluster

    async def __aenter__(self):
        self.runtime = await component.DistributedRuntime.in_memory(self._cluster)
        classifiers = semantic_encoder.load_models(self.settings)
        name = instances.EndpointName("dynamo", encoders.COMPONENT, encoders.ENDPOINT)
        self.counters = health.WorkerMetrics(name, self.runtime.clock)
        self.accepted = semantic_encoder.ClassificationRequests(
            classifiers,
            max_waiting=self.settings.max_waiting,
            counters=self.counters,
            clock=self.runtime.clock,
        )
        self.tasks = tasks.Tasks()
        self.tasks.start("classify", self.accepted.run())
        await self.runtime.register(name, self.accepted.handle)
        return self

    async def __aexit__(self, *_):
        await self.tasks.close()
        self.accepted.close()
        await self.runtime.close()


@pytest.fixture
async def cluster():
    return component.MemoryCluster()


@pytest.fixture
async def client(cluster):
    async with await component.DistributedRuntime.in_memory(cluster) as runtime:
        yield encoder_client.make_client(runtime)


def texts(name, *values):
    return [encoders.ClassifierInput(name, value) for value in values]


def expected(directory, name, text):
    """Return transformers' probabilities of a text."""
    task = "token" if name == "pii" else "sequence"
    model = checkpoints.open_classifier(directory / name, task)
    ids = [1, *(4 + WORDS.index(word) for word in text.split()), 2]
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].softmax(-1).tolist()


class HangingClassifiers:
    """Classifiers whose thread does not come back."""

    names = frozenset({"domain"})

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.has_begun, self.may_end = asyncio.Event(), threading.Event()

    def classify(self, inputs):
        self.loop.call_soon_threadsafe(self.has_begun.set)
        self.may_end.wait(PATIENT_S)
        return []


async def test_encoders_that_hang_are_not_waited_for_at_the_end(cluster, client):
    classifiers = HangingClassifiers()
    name = instances.EndpointName("dynamo", encoders.COMPONENT, encoders.ENDPOINT)
    async with (
        await component.DistributedRuntime.in_memory(cluster) as runtime,
        tasks.Tasks() as running,
    ):
        counters = health.WorkerMetrics(name, runtime.clock)
        accepted = semantic_encoder.ClassificationRequests(
            classifiers, max_waiting=1, counters=counters, clock=runtime.clock
        )
        running.start("classify", accepted.run())
        await runtime.register(name, accepted.handle)
        running.start("ask", client.classify(texts("domain", "good"), PATIENT_S))
        await asyncio.wait_for(classifiers.has_begun.wait(), PATIENT_S)
        accepted.close()
        is_left_computing = not classifiers.may_end.is_set()
        await running.close()
        classifiers.may_end.set()

    assert is_left_computing


async def test_answers_agree_with_transformers(directory, cluster, client):
    text = "bad ann good word7"
    async with EncoderProcess(directory, cluster):
        answers = await client.classify(
            [*texts("domain", text), *texts("attack", text), *texts("pii", text)], PATIENT_S
        )

    for name in ("domain", "attack"):
        answer = answers[name, text]
        assert answer.labels == LABELS[name]
        assert answer.windows[0] == pytest.approx(expected(directory, name, text), abs=1e-4)
    rows = expected(directory, "pii", text)[1:-1]
    covered = [
        any(s.start <= text.index(w) < s.end for s in answers["pii", text].spans)
        for w in text.split()
    ]
    assert covered == [max(row[1:]) > row[0] for row in rows]


async def test_calls_that_wait_are_computed_together(directory, cluster, client, monkeypatch):
    async with EncoderProcess(directory, cluster) as process:
        batches = []
        classify = process.accepted._classifiers.classify
        monkeypatch.setattr(
            process.accepted._classifiers,
            "classify",
            lambda inputs: batches.append(len(inputs)) or classify(inputs),
        )
        await asyncio.gather(
            *(client.classify(texts("attack", f"good word{n}"), PATIENT_S) for n in range(20))
        )

    assert sum(batches) == 20
    assert len(batches) <= 3


async def test_no_process_and_a_refusal_are_no_answers(directory, cluster, client, caplog):
    assert await client.classify(texts("attack", "good"), 0.01) == {}
    async with EncoderProcess(directory, cluster):
        await client._endpoint.wait_for_instances(PATIENT_S)
        assert await client.classify(texts("mood", "good"), PATIENT_S) == {}
    assert "no encoder is loaded for mood" in caplog.text


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_call_whose_process_is_lost_goes_to_another_one(cluster, client, num_lost):
    name = instances.EndpointName("dynamo", encoders.COMPONENT, encoders.ENDPOINT)
    result = encoders.TextLabels(labels=("benign",), windows=((1.0,),))
    calls = []

    def handle(number, call):
        calls.append(number)
        if len(calls) > num_lost:
            call.reply(encoders.ClassificationReply(results=(result,)))
            call.finish()

    runtimes = [await component.DistributedRuntime.in_memory(cluster) for _ in range(2)]
    for number, runtime in enumerate(runtimes):
        await runtime.register(name, functools.partial(handle, number))
    await until(lambda: len(client._endpoint.instances) == 2)
    async with asyncio.TaskGroup() as group:
        answers = group.create_task(client.classify(texts("attack", "good"), PATIENT_S))
        for num in range(1, num_lost + 1):
            await until(lambda num=num: len(calls) == num or answers.done())
            await runtimes[calls[-1]].close()
    for runtime in runtimes:
        await runtime.close()

    assert sorted(calls) == [0, 1]  # none is asked again
    assert answers.result() == ({("attack", "good"): result} if num_lost == 1 else {})


async def test_more_than_may_wait_is_refused_as_overload(directory, cluster):
    async with EncoderProcess(directory, cluster, max_waiting=1) as process:
        entry = semantic_encoder._WaitingCall(None, None, 0, 0.0)
        process.accepted._waiting.append(entry)
        with pytest.raises(errors.Overloaded, match="the encoders are at capacity"):
            process.accepted._accept(None, 0.0)
        process.accepted._drop(entry)
        assert not process.accepted._waiting


async def test_a_batch_that_fails_fails_its_calls(directory, cluster, client, monkeypatch, caplog):
    async with EncoderProcess(directory, cluster) as process:

        def fail(inputs):
            raise RuntimeError(f"{len(inputs)} texts are too many")

        monkeypatch.setattr(process.accepted._classifiers, "classify", fail)
        assert await client.classify(texts("attack", "good"), PATIENT_S) == {}

    assert "the encoder failed: RuntimeError" in caplog.text


async def test_a_request_is_routed_by_what_the_encoders_say(directory, cluster, client):
    routing = service.RoutingService(
        directory / "router.yaml", metrics.Registry("llm"), clock.SystemClock()
    )
    body = chat("good word3")
    silent = routing.route(body, {}, classifiers=await routing.ask_encoders(body))
    routing.connect_encoders(client)
    async with EncoderProcess(directory, cluster):
        asked = routing.route(body, {}, classifiers=await routing.ask_encoders(body))

    assert silent.explanation.path == "blocked"
    law, other = expected(directory, "domain", "good word3")
    assert asked.explanation.category == ("law" if law > other else "other")
    assert asked.explanation.model == ("lawyer" if law > other else "general")
    assert await routing.ask_encoders(b"[") is None


async def test_the_classification_api_asks_the_encoders(directory, cluster, client):
    at = clock.SystemClock()
    routing = service.RoutingService(directory / "router.yaml", metrics.Registry("llm"), at)
    routing.connect_encoders(client)
    running = server.HttpServer(api.make_routes(routing, at))
    port = await running.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENT_S) as browser:

        async def ask(task, **fields):
            return await browser.post(f"/api/v1/classify/{task}", json=fields)

        client._has_waited = True  # nobody comes
        away = await ask("security", text="good")
        async with EncoderProcess(directory, cluster):
            await client._endpoint.wait_for_instances(PATIENT_S)
            found = (await ask("batch", texts=["good word3", "bad"], task_type="all")).json()
            kinds = {m["type"] for m in (await browser.get("/info/models")).json()["models"]}
    await running.close()

    assert (away.status_code, away.json()["error"]["code"]) == (503, "CLASSIFIER_UNAVAILABLE")
    assert kinds == {"encoder"}
    for result, text in zip(found["results"], ("good word3", "bad"), strict=True):
        risk = expected(directory, "attack", text)[1]
        assert result["security"]["risk_score"] == pytest.approx(risk, abs=1e-4)


@pytest.fixture(scope="module")
def exact_directory(tmp_path_factory):
    """Return a directory with the exact profile on an encoder of MiniLM's shape with random weights."""
    made = tmp_path_factory.mktemp("exact")
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    shape["intermediate_size"] = 1536
    checkpoints.make_encoder(made / "base", "bert", **shape, initializer_range=0.05)
    (made / "base" / "tokenizer.json").write_text(tokenizer_files.wordpiece(WORDS))
    (made / "router.yaml").write_text("encoders: {profile: exact, base_model: base}")
    return made


def adapted_scores(base, head, ids):
    """Return the probabilities of a head by transformers, with the shipped adapters added to the weights."""
    weights = classifier_set.EXACT_WEIGHTS
    model = transformers.BertModel.from_pretrained(base, dtype=torch.float32).eval()
    factors = safetensors.torch.load_file(weights / "adapter_model.safetensors")
    fields = json.loads((weights / "adapter_config.json").read_text())
    for name, first in factors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            second = factors[name.replace("lora_A", "lora_B")]
            change = second.float() @ first.float() * fields["lora_alpha"] / fields["r"]
            model.get_submodule(module).weight.data += change
    heads = safetensors.torch.load_file(weights / "heads.safetensors")
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = hidden if head == "names" else hidden.mean(0, keepdim=True)
        weight, bias = (heads[f"{head}.{part}"].float() for part in ("weight", "bias"))
        return (pooled @ weight.T + bias).softmax(-1).tolist()


@pytest.mark.parametrize(("has_bfloat16", "difference"), [(False, 1e-4), (True, 0.05)])
async def test_the_exact_profile_agrees_with_transformers(
    exact_directory, cluster, client, monkeypatch, has_bfloat16, difference
):
    monkeypatch.setattr(runner, "has_bfloat16", lambda: has_bfloat16)
    text = "bad ann good word7"
    ids = [1, *(4 + WORDS.index(word) for word in text.split()), 2]
    inputs = [one for name in ("domain", "attack", "names") for one in texts(f"exact_{name}", text)]
    async with EncoderProcess(exact_directory, cluster) as process:
        (classifier,) = process.accepted._classifiers._classifiers
        rows = classifier.network([ids])
        answers = await client.classify(inputs, PATIENT_S)

    for head in ("domain", "attack", "names"):
        reference = adapted_scores(exact_directory / "base", head, ids)
        for found, row in zip(rows[head][0], reference, strict=True):
            assert found == pytest.approx(row, abs=difference)
    for name in ("domain", "attack"):
        assert answers[f"exact_{name}", text].windows[0] == pytest.approx(tuple(rows[name][0][0]))
    assert len(answers["exact_domain", text].labels) == 14


async def test_one_pass_serves_all_heads(exact_directory, cluster, client):
    async with EncoderProcess(exact_directory, cluster) as process:
        (classifier,) = process.accepted._classifiers._classifiers
        batches = []
        counted = dataclasses.replace(
            classifier,
            network=lambda windows: batches.append(len(windows)) or classifier.network(windows),
        )
        process.accepted._classifiers._classifiers = [counted]
        inputs = [*texts("exact_domain", "good"), *texts("exact_attack", "good", "bad ann")]
        await client.classify(inputs, PATIENT_S)

    assert batches == [2]


EMBEDDING_CONFIG = """
default_model: general
model_config: {general: {}, mechanic: {}}
bert_model: {model_id: sentences}
embedding_rules: [{name: cars, threshold: 0.999, candidates: [bad ann, good word3]}]
decisions:
  - name: car_decision
    rules: {conditions: [{type: embedding, name: cars}]}
    modelRefs: [{model: mechanic}]
"""


@pytest.fixture(scope="module")
def embedding_directory(tmp_path_factory):
    """Return a directory with a rule by embedding, and a sentence encoder with random weights."""
    made = tmp_path_factory.mktemp("embedding")
    checkpoints.make_encoder(made / "sentences", "bert")
    (made / "sentences" / "tokenizer.json").write_text(tokenizer_files.wordpiece(WORDS))
    (made / "router.yaml").write_text(EMBEDDING_CONFIG)
    return made


async def test_vectors_agree_with_transformers(embedding_directory, cluster, client):
    asked = ("bad ann good word7", "good", " ".join(WORDS[4:] * 3))
    async with EncoderProcess(embedding_directory, cluster):
        answers = await client.classify(texts("embedding", *asked), PATIENT_S)

    path = embedding_directory / "sentences"
    model = transformers.BertModel.from_pretrained(path, dtype=torch.float32).eval()
    for text in asked[:2]:
        ids = [1, *(4 + WORDS.index(word) for word in text.split()), 2]
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        vector = encoder_scores.vector_in(answers, text)
        assert vector.tolist() == pytest.approx((mean / mean.norm()).tolist(), abs=1e-4)
    complete = [answers["embedding", text].is_complete for text in asked]
    assert complete == [True, True, False]


async def test_candidates_are_embedded_once_for_a_configuration(
    embedding_directory, cluster, client, monkeypatch
):
    routing = service.RoutingService(
        embedding_directory / "router.yaml", metrics.Registry("llm"), clock.SystemClock()
    )
    routing.connect_encoders(client)
    async with EncoderProcess(embedding_directory, cluster) as process:
        asked = []
        classify = process.accepted._classifiers.classify
        monkeypatch.setattr(
            process.accepted._classifiers,
            "classify",
            lambda inputs: asked.extend(one.text for one in inputs) or classify(inputs),
        )
        bodies = [chat(text) for text in ("bad ann", "good word3", "word9 word8 word7")]
        given = await asyncio.gather(*map(routing.ask_encoders, bodies))
        rules = [
            routing.route(body, {}, classifiers=classifiers).explanation.signals.embedding_rule
            for body, classifiers in zip(bodies, given, strict=True)
        ]

    assert rules == ["cars", "cars", None]
    assert sorted(asked) == sorted(["bad ann", "good word3"] * 2 + ["word9 word8 word7"])


def test_a_base_of_another_shape_is_refused(directory, tmp_path):
    path = tmp_path / "router.yaml"
    path.write_text(f"encoders: {{profile: exact, base_model: {directory}/attack}}")
    settings = semantic_encoder.SemanticEncoderConfig(router_config=str(path))

    with pytest.raises(errors.ConfigError, match="the change of bert"):
        semantic_encoder.load_models(settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [("pii", "the classifier pii needs a token classifier"), ("domain", "needs a sequence")],
)
def test_a_model_for_another_task_stops_the_start(directory, tmp_path, name, message):
    other = directory / ("domain" if name == "pii" else "pii")
    key = "pii_model" if name == "pii" else "category_model"
    fallback = "" if name == "pii" else ", fallback_category: O"
    path = tmp_path / "router.yaml"
    path.write_text(f"classifier: {{{key}: {{model_id: {other}{fallback}}}}}")
    settings = semantic_encoder.SemanticEncoderConfig(router_config=str(path))

    with pytest.raises(errors.ConfigError, match=message):
        semantic_encoder.load_models(settings)


def test_a_configuration_without_models_needs_no_process(tmp_path):
    path = tmp_path / "router.yaml"
    path.write_text("default_model: general")

    with pytest.raises(errors.ConfigError, match="need no process of their own"):
        semantic_encoder.load_models(
            semantic_encoder.SemanticEncoderConfig(router_config=str(path))
        )
    with pytest.raises(errors.ConfigError, match="--config: expected the configuration"):
        semantic_encoder.load_models(semantic_encoder.SemanticEncoderConfig())


def test_the_label_count_of_the_files_is_checked(directory, tmp_path):
    mapping = tmp_path / "labels.json"
    mapping.write_text(json.dumps({"idx_to_label": {"0": "benign", "1": "a", "2": "b"}}))
    path = tmp_path / "router.yaml"
    path.write_text(
        f"prompt_guard: {{model_id: {directory}/attack, jailbreak_mapping_path: {mapping}}}"
    )

    with pytest.raises(errors.ConfigError, match="classifier"):
        semantic_encoder.load_models(
            semantic_encoder.SemanticEncoderConfig(router_config=str(path))
        )


def test_explain_and_replay_ask_the_encoders(directory, tmp_path, capsys):
    path = str(directory / "router.yaml")
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(chat("bad ann"))
    shares = dict(zip(LABELS["domain"], expected(directory, "domain", "bad ann"), strict=True))
    best = max(shares, key=shares.get)

    explained = command.SemanticCommandConfig(
        action="explain", subject="bad ann", semantic_router=path
    )
    replayed = command.SemanticCommandConfig(
        action="replay", subject=str(trace), new_config=path, semantic_router=path
    )
    assert command.run(explained) == 0
    lines = capsys.readouterr().out.splitlines()
    assert command.run(replayed) == 0

    assert f"domain: {best} ({best} {shares[best]:.2f}" in "\n".join(lines)
    model = {"law": "lawyer", "other": "general"}[best]
    assert f"x-vsr-selected-model: {model}" in lines
    expected_lines = ["1 requests, 0 change, 0 lines are no request", f"     1  go to {model}"]
    assert expected_lines == capsys.readouterr().out.splitlines()
