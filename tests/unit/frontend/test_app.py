"""Routes that do not generate, and what the door itself refuses."""

import asyncio
import collections
import pathlib
import re
from unittest import mock

import pytest

from dynamo.frontend import service
from dynamo.frontend.apis import operation
from dynamo.protocols import model_card
from waiting import PATIENT_S

DOWN = "dynamo_frontend_model_workers_down"


async def test_models_are_listed(rig):
    await rig.worker("org/name")
    body = (await rig.client.get("/v1/models")).json()

    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["m", "org/name"]
    assert body["data"][0] == {
        "id": "m",
        "object": "model",
        "created": 1700000000,
        "owned_by": "dynamo",
        "context_window": 200,
        "max_model_len": 200,
        "root": "m",
        "parent": None,
        "capabilities": ["chat", "completions", "logprobs"],
        "num_workers": 1,
        "adapters": [],
    }


async def test_listed_model_tells_what_it_can_and_what_is_loaded(rig):
    able = model_card.ModelRuntimeConfig(
        tool_call_parser="hermes", reasoning_parser="basic", supports_guided=True
    )
    await rig.worker("base", runtime_config=able, lora_names=("poet",))
    await rig.embedder()
    rows = {row["id"]: row for row in (await rig.client.get("/v1/models")).json()["data"]}
    found = rows["base"]["capabilities"]

    assert found == [
        "chat", "completions", "tools", "reasoning", "structured_outputs", "logprobs",
    ]  # fmt: skip
    assert rows["e"]["capabilities"] == ["embeddings"]
    assert rows["base"]["adapters"] == ["poet"]
    assert (rows["poet"]["root"], rows["poet"]["parent"]) == ("base", "base")
    assert rows["poet"]["adapters"] == []


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname"])
async def test_model_name_may_contain_a_slash(rig, path):
    await rig.worker("org/name")
    answer = await rig.client.get(path)

    assert answer.json()["id"] == "org/name"


async def test_error_for_an_unknown_model_lists_the_served_models(rig):
    answer = await rig.client.get("/v1/models/nope")

    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model 'nope' does not exist. Served here: 'm'.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_anthropics_clients_get_models_and_errors_in_their_form(rig):
    headers = {"anthropic-version": "2023-06-01"}
    (listed,) = (await rig.client.get("/v1/models", headers=headers)).json()["data"]
    shown = await rig.client.get(f"/v1/models/{listed['id']}", headers=headers)
    unknown = await rig.client.get("/v1/models/nope", headers=headers)

    assert listed["type"] == "model"
    assert shown.json() == listed
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"


async def test_healthy_with_an_instance(rig):
    answer = await rig.client.get("/health")
    body = answer.json()

    assert answer.status_code == 200
    assert body["status"] == "healthy"
    assert body["endpoints"] == ["dyn://dynamo.backend.generate"]
    assert body["instances"][0]["instance_id"] == rig.one.runtime.instance_id
    assert body["instances"][0]["instance"] == f"{rig.one.runtime.instance_id:x}"


async def test_worker_whose_connection_has_ended_is_shown_as_down(rig):
    async def state():
        page = (await rig.client.get("/metrics")).text
        health = (await rig.client.get("/health")).json()
        return [row["state"] for row in health["instances"]], f'{DOWN}{{model="m"}} 1.0' in page

    await rig.chat()  # so there is a connection
    before = await state()
    await rig.one.runtime.requests.close()  # as a process that was killed: discovery lists it still

    assert before == (["ready"], False)
    async with asyncio.timeout(PATIENT_S):
        while await state() != (["down"], True):
            await asyncio.sleep(0.01)


async def test_unhealthy_but_alive_without_an_instance(bare):
    await bare.start()
    health, live = await bare.client.get("/health"), await bare.client.get("/live")

    assert health.status_code == 503
    assert health.json() == {
        "status": "unhealthy",
        "message": "No endpoints available",
        "instances": [],
    }
    assert live.status_code == 200
    assert live.json() == {"status": "live", "message": "Service is live"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/none"),
        ("GET", "/v1/responses/none"),
        ("DELETE", "/v1/responses/none"),
        ("GET", "/busy_threshold"),
        ("POST", "/busy_threshold"),
        ("POST", "/tokenize"),
        ("POST", "/clear_kv_blocks"),
    ],
)
async def test_every_response_has_its_request_id(rig, method, path):
    named = await rig.client.request(method, path, headers={"x-request-id": "mine"})
    unnamed = await rig.client.request(method, path)

    assert named.headers["x-request-id"] == "mine"
    assert unnamed.headers["x-request-id"] not in ("", "mine")


async def test_page_without_script_has_working_links(rig):
    answer = await rig.client.get("/")

    assert answer.headers["content-type"].startswith("text/html")
    links = re.findall(r'<a href="([^"]+)"', answer.text)
    assert "/docs" in links
    assert {(await rig.client.get(link)).status_code for link in links} == {200}


def test_every_route_that_takes_a_body_is_in_the_documentation():
    page = (pathlib.Path(__file__).parents[3] / "docs" / "api.md").read_text()
    routes = [
        f"POST {entry.path}"
        for entry in service.Frontend._declare_operations(*[mock.MagicMock()] * 6)
        if entry.method == "POST" and operation.ANY_ID not in entry.path
    ]

    assert len(routes) >= 8
    assert [route for route in routes if f"| `{route}` |" not in page] == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("GET", "/nope", 404),
        ("POST", "/v1/images", 404),
    ],
)
async def test_wrong_method_or_path_is_an_openai_error(rig, method, path, status):
    answer = await rig.client.request(method, path)
    error = answer.json()["error"]

    assert answer.status_code == status
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_every_route_names_its_methods_and_answers_head_where_it_answers_get(rig):
    methods_by_path = collections.defaultdict(lambda: {"OPTIONS"})
    for entry in service.Frontend._declare_operations(*[mock.MagicMock()] * 6):
        path = entry.path.replace("**", "none").replace("*", "none")
        methods_by_path[path] |= {"GET", "HEAD"} if entry.method == "GET" else {entry.method}
    ask = rig.client.request
    for path, methods in methods_by_path.items():
        allowed = ", ".join(sorted(methods))
        named = [await ask("OPTIONS", path), await ask("PATCH", path)]
        assert [(row.status_code, row.headers["allow"]) for row in named] == [
            (204, allowed), (405, allowed)
        ], path  # fmt: skip
        if "GET" in methods and path != "/console/api/events":  # which does not end
            head, get = await ask("HEAD", path), await ask("GET", path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type"] == get.headers["content-type"], path

    assert len(methods_by_path) > 60


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_of_sagemaker_and_vllm_needs_no_key(bare, tmp_path, method):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "sk-ann-12345"\n')
    await bare.start(api_keys_file=str(keys))

    assert (await bare.client.request(method, "/ping")).status_code == 200


async def test_wrong_content_type_is_refused(rig):
    answer = await rig.client.post(
        "/v1/completions", content=b"{}", headers={"content-type": "a/b"}
    )

    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


async def test_body_over_the_limit_is_an_openai_error(bare):
    await bare.start(http_body_limit_mb=1)
    answer = await bare.client.post("/v1/completions", content=b"x" * (2**20 + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
