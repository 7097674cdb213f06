"""The classification API over HTTP."""

import contextlib
import threading

import httpx
import pytest

import embedding_server
from dynamo.base import clock
from dynamo.gateway import api
from dynamo.observability import metrics
from dynamo.runtime.http import server
from dynamo.semantic import config_file, service
from dynamo.semantic.classifiers import profile
from semantic_configs import ATTACK, CARD, COMPLETION, CONFIG, SUM, chat
from waiting import PATIENT_S


@pytest.fixture
def routing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())


@contextlib.asynccontextmanager
async def running_api(routing, key=None, **options):
    running = server.HttpServer(api.make_routes(routing, clock.SystemClock(), key, **options))
    port = await running.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENT_S) as made:
        yield made
    await running.close()


@pytest.fixture
async def client(routing):
    async with running_api(routing) as made:
        yield made


async def classify(client, task, **fields):
    return (await client.post(f"/api/v1/classify/{task}", json=fields)).json()


async def test_intent_has_category_model_and_probabilities(client):
    text = "Solve this equation: find the derivative of x^2"
    options = {"return_probabilities": True}

    answer = await classify(client, "intent", text=text, options=options)

    assert answer["classification"]["category"] == "math"
    assert answer["recommended_model"] == "mathy"
    assert len(answer["probabilities"]) == 14


async def test_personal_data_is_located_and_not_repeated(client):
    answer = await classify(client, "pii", text=f"card {CARD}")

    assert answer["has_pii"]
    (entity,) = answer["entities"]
    assert (entity["type"], entity["start_position"], entity["value"]) == (
        "CREDIT_CARD",
        5,
        "[DETECTED]",
    )


async def test_personal_data_below_the_threshold_of_the_guard_is_none(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"{CONFIG}classifier: {{pii_model: {{threshold: 0.99}}}}\n")
    made = service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())
    async with running_api(made) as client:
        answers = [
            await classify(client, "pii", text=text)
            for text in ("from 203.0.113.9", f"card {CARD}")
        ]

    assert [answer["security_recommendation"] for answer in answers] == ["allow", "block"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("priority: 20", "priority: 20\n    mode: observe"),
        ("    modelRefs: [{model: coder", "    # "),
    ],
)
async def test_recommended_model_is_that_of_the_decision_that_is_followed(tmp_path, old, new):
    path = tmp_path / "config.yaml"
    rules = "rules: {conditions: [{type: keyword, name: code}]}, modelRefs: [{model: mathy}]"
    path.write_text(
        CONFIG.replace(old, new).replace(
            "prompt_guard:", f"  - {{name: rest, {rules}}}\nprompt_guard:"
        )
    )
    made = service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())
    routed = made.route(chat("python"), {}).explanation.model
    async with running_api(made) as client:
        answer = await classify(client, "intent", text="python")

    assert answer["recommended_model"] == routed


async def test_risk_is_the_probability_of_an_attack(client):
    attack = await classify(client, "security", text=ATTACK)
    harmless = await classify(client, "security", text="What is the capital of France?")

    assert attack["is_jailbreak"]
    assert attack["risk_score"] > 0.7
    assert harmless["risk_score"] < 0.3
    assert harmless["confidence"] > 0.7


async def test_batch_keeps_the_order_and_sums_up(client):
    texts = ["What is a contract in law?", CARD]

    answer = await classify(client, "batch", texts=texts, task_type="all")

    assert [result["pii"]["has_pii"] for result in answer["results"]] == [False, True]
    assert answer["total_count"] == 2
    assert sum(answer["statistics"]["category_distribution"].values()) == 2


DEEP = b'{"text": "a", "texts": ["a"], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"text": ""}', b'{"text": 1}', b"\xff", b'{"texts": []}', DEEP]
)
async def test_wrong_body_is_named(client, body):
    for task in ("intent", "batch"):
        answer = await client.post(f"/api/v1/classify/{task}", content=body)

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "INVALID_INPUT"


async def test_configuration_is_shown_without_keys(client):
    answer = await client.get("/config/classification")

    assert answer.json()["config"]["model_config"]["mathy"]["access_key"] == "(set)"


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/api/v1",
        "/info/models",
        "/info/classifier",
        "/v1/models",
        "/api/v1/response-cache/stats",
    ],
)
async def test_description_is_served(client, path):
    assert (await client.get(path)).status_code == 200


async def test_caller_deletes_its_own_cached_answer(client, routing):
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    outcome = routing.route(chat(SUM), ann, service.tenant_of(ann))
    routing.record_answer(outcome, COMPLETION)
    body = {"keys": [outcome.explanation.cache_key, "unknown"]}
    path = "/api/v1/response-cache/invalidate"

    answers = [(await client.post(path, json=body, headers=key)).json() for key in (bob, ann)]

    assert [answer["removed"] for answer in answers] == [0, 1]
    assert (await client.post(path, json={"keys": []})).status_code == 400


async def test_caller_deletes_all_answers_of_its_key(client, routing):
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    for key in (ann, bob):
        outcome = routing.route(chat(SUM), key, service.tenant_of(key))
        routing.record_answer(outcome, COMPLETION)
    path = "/api/v1/response-cache/invalidate"

    answer = await client.post(path, json={"all": True}, headers=ann)

    assert answer.json()["removed"] == 1
    assert len(routing.router.cache) == 1
    assert (await client.post(path, json={"all": True})).status_code == 400


@pytest.fixture
async def embedding_client(tmp_path):
    """A client of the API of a configuration that compares by a server's embeddings."""
    async with embedding_server.serving(embedding_server.embeddings) as (url, _):
        path = tmp_path / "embeddings.yaml"
        path.write_text(embedding_server.CONFIG.format(url=url))
        made = service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())
        async with running_api(made) as client:
            yield client


async def test_embeddings_are_those_of_the_configured_model(embedding_client):
    texts = ["engine trouble", "hello"]
    answer = (await embedding_client.post("/api/v1/embeddings", json={"texts": texts})).json()
    listed = (await embedding_client.get("/api/v1/embeddings/models")).json()

    assert [row["text"] for row in answer["embeddings"]] == texts
    assert answer["embeddings"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert {row["model_used"] for row in answer["embeddings"]} == {"m"}
    assert answer["total_count"] == listed["models"][0]["is_loaded"] + 1 == 2


async def test_similarity_is_the_cosine(embedding_client):
    body = {"text1": "engine trouble", "text2": "hello"}
    answer = (await embedding_client.post("/api/v1/similarity", json=body)).json()

    assert answer["similarity"] == pytest.approx(0, abs=1e-6)


async def test_most_similar_candidates_come_first(embedding_client):
    body = {"query": "engine trouble", "candidates": ["hello", "my car stalls"], "top_k": 1}
    answer = (await embedding_client.post("/api/v1/similarity/batch", json=body)).json()

    assert [(match["index"], match["text"]) for match in answer["matches"]] == [
        (1, "my car stalls")
    ]
    assert answer["total_candidates"] == 2


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("embeddings", {"texts": ["hello"], "dimension": 768}, "dimension: expected 2"),
        ("embeddings", {"texts": []}, "length >= 1"),
        ("similarity", {"text1": "hello"}, "text2"),
        ("similarity/batch", {"query": "hello", "candidates": ["hello"], "top_k": -1}, "top_k"),
    ],
)
async def test_wrong_question_for_embeddings_is_refused(embedding_client, path, body, message):
    answer = await embedding_client.post(f"/api/v1/{path}", json=body)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_text_that_the_server_cannot_embed_is_unavailable(embedding_client):
    body = {"text1": "hello", "text2": "unknown"}

    assert (await embedding_client.post("/api/v1/similarity", json=body)).status_code == 503


async def test_embeddings_need_a_model_in_the_configuration(client):
    answer = await client.post("/api/v1/embeddings", json={"texts": ["hello"]})
    listed = (await client.get("/api/v1/embeddings/models")).json()

    assert answer.status_code == 400
    assert "encoders.embeddings_url" in answer.json()["error"]["message"]
    assert listed["models"] == []


async def test_description_has_every_path_and_the_bodies(client):
    described = (await client.get("/openapi.json")).json()
    index = (await client.get("/api/v1")).json()["endpoints"]

    for endpoint in index:
        method, path = endpoint.split()
        assert method.lower() in described["paths"][path]
    body = described["paths"]["/api/v1/similarity"]["post"]["requestBody"]
    assert "TextPair" in body["content"]["application/json"]["schema"]["$ref"]


async def test_long_text_is_made_ready_for_encoders_beside_the_event_loop(
    client, routing, monkeypatch
):
    threads = []

    async def answer(_):
        return profile.load_profile()

    def list_inputs(_):
        threads.append(threading.current_thread())
        return []

    monkeypatch.setattr(config_file.LoadedConfig, "uses_encoders", True)
    monkeypatch.setattr(routing, "ask_encoders_for", answer)
    monkeypatch.setattr(routing.router, "list_inputs_for", list_inputs)
    await classify(client, "security", text="word " * 100_000)

    assert len(threads) == 1
    assert threading.main_thread() not in threads
