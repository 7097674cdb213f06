"""The classification API over HTTP."""

import httpx
import pytest

from dynamo.base import clock
from dynamo.gateway import api
from dynamo.observability import metrics
from dynamo.runtime.http import server
from dynamo.semantic import service
from semantic_configs import ATTACK, CARD, COMPLETION, CONFIG, SUM, chat
from waiting import PATIENT_S


@pytest.fixture
def routing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())


@pytest.fixture
async def client(routing):
    running = server.HttpServer(api.make_routes(routing, clock.SystemClock()))
    port = await running.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENT_S) as made:
        yield made
    await running.close()


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


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"text": ""}', b'{"text": 1}', b"\xff", b'{"texts": []}']
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
