"""What administrators see and change over the classification API."""

import json
from unittest import mock

import msgspec
import pytest
from test_classification_api import running_api

from dynamo.base import clock, errors
from dynamo.gateway import administration
from dynamo.observability import metrics
from dynamo.semantic import config_file, service
from semantic_configs import COMPLETION, CONFIG, SUM, chat

CONFIG_PATH, PROMPTS_PATH = "/config/classification", "/config/system-prompts"
FLUSH_PATH = "/api/v1/response-cache/flush"
KEY = "a key of administrators"


@pytest.fixture
def routing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return service.RoutingService(path, metrics.Registry("llm"), clock.SystemClock())


@pytest.fixture
async def client(routing):
    async with running_api(routing, has_system_prompts=True) as made:
        yield made


async def test_change_takes_effect_at_once_and_says_that_it_is_not_written(client, routing):
    before = routing.loader.path.read_text()

    answer = await client.put(CONFIG_PATH, json={"default_model": "coder"})

    assert answer.json()["config"]["default_model"] == "coder"
    assert routing.route(chat("hello"), {}).explanation.model == "coder"
    assert not answer.json()["is_saved"]
    assert "not written" in answer.json()["message"]
    assert routing.loader.path.read_text() == before


async def test_rest_of_the_configuration_stays(client, routing):
    await client.put(CONFIG_PATH, json={"prompt_guard": {"threshold": 0.9}})

    settings = routing.router.settings
    assert (settings.prompt_guard.enabled, settings.prompt_guard.threshold) == (True, 0.9)
    assert len(settings.decisions) == 2


async def test_null_removes_a_key(client, routing):
    await client.put(CONFIG_PATH, json={"model_config": {"general": None}})

    assert sorted(routing.router.settings.model_config) == ["coder", "mathy"]


async def test_shown_configuration_is_taken_again_with_its_hidden_keys(client, routing):
    before = routing.router.settings
    shown = (await client.get(CONFIG_PATH)).json()

    answer = await client.put(CONFIG_PATH, json=shown["config"])

    assert shown["is_saved"]
    assert shown["config"]["model_config"]["mathy"]["access_key"] == config_file.HIDDEN_KEY
    assert answer.status_code == 200
    assert routing.router.settings == before


async def test_keys_in_headers_are_hidden_and_kept(client, routing):
    headers = "add: [{name: X-Api-Key, value: a secret}, {name: X-Team, value: sums}]"
    routing.loader.path.write_text(CONFIG.replace("add: [{name: X-Team, value: sums}]", headers))
    assert routing.loader.reload_if_changed()
    before = routing.router.settings
    answer = await client.get(CONFIG_PATH)
    config = answer.json()["config"]
    again = await client.put(CONFIG_PATH, json={"decisions": config["decisions"]})
    config["decisions"][1]["name"] = "another"
    unknown = await client.put(CONFIG_PATH, json={"decisions": config["decisions"]})

    assert "a secret" not in answer.text + again.text
    assert '"sums"' in answer.text
    assert again.status_code == 200
    assert routing.router.settings == before
    assert ("x-api-key", "a secret") in routing.route(chat(SUM), {}).upstream_headers
    assert unknown.status_code == 400
    assert "expected the value of X-Api-Key" in unknown.text


async def test_password_of_milvus_is_hidden_and_kept(client, routing):
    auth = "{enabled: true, username: router, password: secret}"
    section = f", milvus: {{connection: {{auth: {auth}}}}}}}"
    routing.loader.path.write_text(CONFIG.rstrip().removesuffix("}") + section)
    assert routing.loader.reload_if_changed()

    shown = (await client.get(CONFIG_PATH)).json()["config"]
    answer = await client.put(CONFIG_PATH, json={**shown, "default_model": "coder"})

    connection = shown["semantic_cache"]["milvus"]["connection"]
    assert connection["auth"]["password"] == config_file.HIDDEN_KEY
    assert answer.status_code == 200
    kept = routing.router.settings.semantic_cache.milvus.connection.auth
    assert kept.password == "secret"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "best"}, "strategy"),
        ({"stratgey": "priority"}, "no such key: stratgey"),
        ({"prompt_guard": {"treshold": 1}}, "prompt_guard.treshold"),
        ({"model_config": 3}, "model_config"),
        ({"fact_check_rules": [{"name": "x"}]}, "fact_check_rules"),
        ({"version": "v0.3"}, "version"),
        ({"encoders": {"embeddings_key_variable": "HOME"}}, "encoders"),
        ({"semantic_cache": {"directory": "/tmp"}}, "semantic_cache.directory"),
        ({"semantic_cache": {"backend_config_path": "/etc/passwd"}}, "backend_config_path"),
        ({"semantic_cache": {"milvus": {}}}, "semantic_cache.milvus"),
        ([], "object"),
        ({"model_config": {"mathy": {"reasoning_family": "none"}}}, "reasoning_family"),
        ({"mom_registry": {str(n): "x" for n in range(50_001)}}, "values"),
        ({"mom_registry": {"x": "y" * 2**20}}, "bytes"),
    ],
)
async def test_wrong_change_is_named_and_the_old_configuration_stays(
    client, routing, change, message
):
    before = routing.router.settings

    answer = await client.put(CONFIG_PATH, json=change)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert routing.router.settings is before


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"a":' * 100_000])
async def test_body_that_is_no_json_is_refused(client, body):
    assert (await client.put(CONFIG_PATH, content=body)).status_code == 400


async def test_changed_file_takes_the_place_of_a_change(client, routing):
    await client.put(CONFIG_PATH, json={"default_model": "coder"})
    routing.loader.path.write_text(CONFIG + "\nstrategy: confidence\n")
    routing.loader.reload_if_changed()

    shown = (await client.get(CONFIG_PATH)).json()

    assert shown["config"]["default_model"] == "general"
    assert shown["is_saved"]


async def test_system_prompt_is_switched_and_moved(client, routing):
    shown = (await client.get(PROMPTS_PATH)).json()["system_prompts"]
    prompt = {"prompt": "You calculate.", "enabled": True, "mode": "replace"}
    none = {"prompt": "", "enabled": False, "mode": "replace"}
    assert shown == [
        {"category": "code_decision", **none},
        {"category": "sums_decision", **prompt},
    ]

    await client.put(PROMPTS_PATH, json={"category": "sums_decision", "mode": "insert"})
    inserted = routing.route(chat(SUM, system="Be brief."), {}, api="messages")
    off = await client.put(PROMPTS_PATH, json={"enabled": False})

    assert json.loads(inserted.body)["system"] == "You calculate.\n\nBe brief."
    assert off.json()["system_prompts"][1] == {
        "category": "sums_decision",
        **prompt,
        "enabled": False,
        "mode": "insert",
    }
    assert not off.json()["is_saved"]
    assert not routing.route(chat(SUM), {}).explanation.has_system_prompt


@pytest.mark.parametrize(
    "change",
    [{}, {"mode": "before"}, {"enabled": True, "category": "code_decision"}, {"prompt": 1}],
)
async def test_wrong_change_of_prompts_is_refused(client, change):
    assert (await client.put(PROMPTS_PATH, json=change)).status_code == 400


async def test_system_prompts_are_there_only_with_their_flag(routing):
    async with running_api(routing, has_system_prompts=False) as client:
        assert (await client.get(PROMPTS_PATH)).status_code == 404
        assert (await client.put(PROMPTS_PATH, json={"enabled": False})).status_code == 404


async def test_with_a_key_only_its_owner_changes_anything(routing):
    outcome = routing.route(chat(SUM), {})
    routing.record_answer(outcome, COMPLETION)
    wrong = (
        {},
        {"authorization": "Bearer no"},
        {"x-api-key": "no"},
        {"authorization": f"Basic {KEY}"},
    )
    right = ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY})
    change = {"enabled": False}
    async with running_api(routing, KEY, has_system_prompts=True) as client:
        for headers in wrong:
            answers = [
                await client.put(CONFIG_PATH, json={}, headers=headers),
                await client.put(PROMPTS_PATH, json=change, headers=headers),
                await client.post(FLUSH_PATH, headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [401] * 3
            assert answers[0].json()["error"]["code"] == "UNAUTHORIZED"
        assert len(routing.router.cache) == 1
        assert (await client.post(FLUSH_PATH, headers=right[0])).json() == {"removed": 1}
        for headers in right:
            assert (await client.put(CONFIG_PATH, json={}, headers=headers)).status_code == 200


async def test_without_a_key_a_browser_changes_nothing(client):
    answer = await client.put(CONFIG_PATH, json={}, headers={"origin": "http://page"})

    assert answer.status_code == 403
    assert "--admin-key-file" in answer.json()["error"]["message"]


@pytest.mark.parametrize("peer", ["10.0.0.9:80", "", "2001:db8::1:80"])
async def test_without_a_key_another_host_changes_nothing(routing, peer):
    admin = administration.Administration(routing, None)
    request = mock.Mock(peer=peer, headers={}, path=CONFIG_PATH)
    change = admin.restrict(admin.answer_config_change)

    with pytest.raises(errors.Forbidden, match="from this host"):
        await change(mock.Mock(request=request))


async def test_metrics_count_what_was_classified(client, routing):
    await client.post("/api/v1/classify/pii", json={"text": "hello"})
    routing.route(chat("hello"), {})

    answer = (await client.get("/metrics/classification")).json()

    assert answer["classifiers"]["pii"]["count"] == 1
    assert answer["classifiers"]["pii"]["mean_ms"] > 0
    assert (answer["decision_count"], answer["signal_counts"]["keywords"]) == (2, 2)


async def test_page_names_each_path_and_loads_nothing_from_elsewhere(client):
    answer = await client.get("/docs")

    assert answer.headers["content-type"].startswith("text/html")
    assert (
        "<td>PUT</td><td>/config/system-prompts</td><td>category, enabled, mode</td>" in answer.text
    )
    assert "://" not in answer.text


async def test_bodies_of_changes_are_described(client):
    paths = (await client.get("/openapi.json")).json()["paths"]

    assert "requestBody" in paths[CONFIG_PATH]["put"]
    assert "requestBody" not in paths[CONFIG_PATH]["get"]


@pytest.mark.parametrize("content", [b"short\n", b"\xff" * 20, None])
def test_key_file_without_a_key_stops_the_start(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(errors.ConfigError, match="--admin-key-file"):
        administration.read_key(path)


def test_key_is_the_text_of_its_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")

    assert administration.read_key(path) == KEY


def test_merge_keeps_what_a_change_does_not_name():
    current = msgspec.convert(
        {"mom_registry": {"a": "b", "c": "d"}}, config_file.config.SemanticConfig
    )

    loaded = config_file.parse_change(
        b'{"mom_registry": {"a": null, "e": "f"}}', current, frozenset()
    )

    assert loaded.settings.mom_registry == {"c": "d", "e": "f"}
