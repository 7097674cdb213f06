"""Tenants: stored responses, cached prefixes, and rights belong to the tenant of an API key."""

import contextlib
import logging
import time

import pytest
from frontend_rig import Rig

from dynamo.base import errors, membership
from dynamo.frontend.apis import error_dialects
from dynamo.frontend.delivery import delivery
from dynamo.observability import logs
from dynamo.protocols import model_card, model_errors

KEYS = """
[tenants.acme]
[tenants.other]

[[keys]]
name = "ann"
key = "sk-ann-00001"
tenant = "acme"

[[keys]]
name = "abe"
key = "sk-abe-00001"
tenant = "acme"

[[keys]]
name = "bob"
key = "sk-bob-00001"
tenant = "other"

[[keys]]
name = "eve"
key = "sk-eve-00001"

[[keys]]
name = "gateway"
key = "sk-gateway-1"
may_choose_worker = true
may_set_priority = true
"""
ANN, ABE, BOB, EVE, GATEWAY = (
    {"authorization": f"Bearer {key}"}
    for key in ("sk-ann-00001", "sk-abe-00001", "sk-bob-00001", "sk-eve-00001", "sk-gateway-1")
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def start(bare, tmp_path):
    async def start(keys=KEYS):
        path = tmp_path / "keys.toml"
        path.write_text(keys)
        await bare.start(api_keys_file=str(path))
        bare.one = await bare.worker()
        bare.ask = lambda headers, more=(), **fields: bare.client.post(
            "/v1/chat/completions", json=CHAT | fields, headers=headers | dict(more)
        )
        return bare

    return start


async def store(rig, headers):
    """The id of a response that was stored for this key."""
    answer = await rig.client.post(
        "/v1/responses", json={"model": "m", "input": "hi"}, headers=headers
    )
    return answer.json()["id"]


async def test_stored_response_is_read_by_keys_of_its_tenant_alone(start):
    rig = await start()
    path = f"/v1/responses/{await store(rig, ANN)}"
    statuses = [(await rig.client.get(path, headers=key)).status_code for key in (ABE, BOB, EVE)]

    assert statuses == [200, 404, 404]


async def test_key_without_a_tenant_is_its_own(start):
    rig = await start()
    path = f"/v1/responses/{await store(rig, EVE)}"
    statuses = [(await rig.client.get(path, headers=key)).status_code for key in (EVE, ANN)]

    assert statuses == [200, 404]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_stored_response_is_continued_by_its_tenant_alone(start, path):
    rig = await start()
    body = {"model": "m", "input": "more", "previous_response_id": await store(rig, ANN)}
    answers = [await rig.client.post(path, json=body, headers=key) for key in (ABE, BOB)]

    assert [answer.status_code for answer in answers] == [200, 400]
    assert "not found" in answers[1].json()["error"]["message"]


async def test_stored_response_is_deleted_by_its_tenant_alone(start):
    rig = await start()
    path = f"/v1/responses/{await store(rig, ANN)}"
    statuses = [(await rig.client.delete(path, headers=key)).status_code for key in (BOB, ABE)]

    assert statuses == [404, 200]
    assert (await rig.client.get(path, headers=ANN)).status_code == 404


async def test_prefixes_are_salted_by_tenant(start):
    rig = await start()
    for key in (ANN, ABE, BOB, EVE):
        await rig.ask(key)
    ann, abe, bob, eve = (request.cache_salt for request in rig.one.requests)

    assert ann == abe
    assert None not in (ann, bob, eve)
    assert len({ann, bob, eve}) == 3
    assert len({request.hash_seed for request in rig.one.requests}) == 3


async def test_salts_depend_on_the_cluster_token(model_dir, tmp_path, monkeypatch):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    salts = []
    for token in ("", "a" * 32, "b" * 32, "a" * 32):
        monkeypatch.setenv(membership.TOKEN_VARIABLE, token)
        async with contextlib.AsyncExitStack() as stack:
            rig = Rig(model_dir, stack)
            await rig.start(api_keys_file=str(path))
            worker = await rig.worker()
            await rig.client.post("/v1/chat/completions", json=CHAT, headers=ANN)
            salts += [request.cache_salt for request in worker.requests]

    assert len(salts) == 4
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3


async def test_salt_of_a_request_divides_the_cache_of_its_tenant_further(start):
    rig = await start()
    for key, salt in ((ANN, "x"), (ANN, "x"), (ANN, "y"), (BOB, "x")):
        await rig.ask(key, cache_salt=salt)
    one, same, other, foreign = (request.cache_salt for request in rig.one.requests)

    assert one == same
    assert len({one, other, foreign}) == 3


async def test_tenants_share_their_cache_by_configuration(start):
    rig = await start("share_prefix_cache = true\n" + KEYS)
    await rig.ask(ANN)
    await rig.ask(BOB)
    await rig.ask(ANN, cache_salt="x")
    ann, bob, salted = (request.cache_salt for request in rig.one.requests)

    assert (ann, bob) == (None, None)
    assert salted is not None


NO_SALT = model_card.ModelRuntimeConfig(supports_cache_salt=False)


async def test_engine_that_cannot_keep_tenants_apart_is_warned_about_once(bare, tmp_path, caplog):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path))
    await bare.worker(runtime_config=NO_SALT)
    for key in (ANN, BOB):
        await bare.client.post("/v1/chat/completions", json=CHAT, headers=key)

    assert caplog.text.count("does not keep the cached prefixes of tenants apart") == 1


async def test_salt_that_an_engine_cannot_keep_is_refused(bare):
    await bare.start()
    await bare.worker(runtime_config=NO_SALT)
    answer = await bare.chat(cache_salt="x")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


async def test_without_keys_only_the_salt_of_a_request_counts(rig):
    await rig.chat()
    await rig.chat(cache_salt="x")
    plain, salted = (request.cache_salt for request in rig.one.requests)

    assert plain is None
    assert salted is not None


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({"x-worker-instance-id": "ID"}, {}, "may_choose_worker"),
        ({"x-dp-rank": "0"}, {}, "may_choose_worker"),
        ({}, {"nvext": {"backend_instance_id": "ID"}}, "may_choose_worker"),
        ({}, {"nvext": {"annotations": ["query_instance_id"]}, "stream": True}, "may_choose_worker"),
        ({}, {"priority": -1}, "may_set_priority"),
        ({}, {"nvext": {"agent_hints": {"priority": 1}}}, "may_set_priority"),
        ({}, {"nvext": {"cache_control": {"pin": True}}}, "may_set_priority"),
    ],
)  # fmt: skip
async def test_choice_of_a_worker_or_a_priority_needs_a_right(start, headers, fields, field):
    rig = await start()
    instance_id = rig.one.instance.instance_id
    headers = {name: value.replace("ID", str(instance_id)) for name, value in headers.items()}
    if fields.get("nvext", {}).get("backend_instance_id"):
        fields = {"nvext": {"backend_instance_id": instance_id}}
    refused = await rig.ask(ANN, headers, **fields)
    answer = await rig.ask(GATEWAY, headers, **fields)

    assert refused.status_code == 403
    assert field in refused.json()["error"]["message"]
    assert answer.status_code == 200


async def test_health_without_a_key_tells_health_only(start):
    rig = await start()
    plain = await rig.client.get("/health")
    with_key = await rig.client.get("/health", headers=ANN)

    assert plain.json() == {"status": "healthy"}
    assert with_key.json()["instances"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.WorkerLost("worker at 10.0.0.7:41327 closed"), "worker at … closed"),
        (errors.NoWorkers("cannot connect to [fe80::1]:80: ('10.1.2.3', 80)"), "cannot connect to …: ('…', 80)"),
        (errors.Unavailable("nats://a.b:4222/x is gone"), "… is gone"),
        (errors.WorkerLost("worker at pod-3.svc.local:9000 left"), "worker at … left"),
        (errors.EngineFailed("cannot read /run/user/1000/x.sock"), "cannot read …"),
        (errors.NoWorkers("the model 'Qwen/Qwen3-0.6B' has no worker"), "the model 'Qwen/Qwen3-0.6B' has no worker"),
        (errors.WorkerLost("cannot connect to fd77::3 or ::1, or [fd77::3]:80"), "cannot connect to … or …, or …"),
        (errors.WorkerLost("no address for decode-0.pool.example.org"), "no address for …"),
        (errors.WorkerLost("worker-1.internal does not answer."), "… does not answer."),
        (errors.WorkerLost("certificate is not valid for 'decode-host'."), "certificate is not valid for '…'."),
        (errors.NoWorkers("the model 'Qwen2.5-0.6B' has no worker"), "the model 'Qwen2.5-0.6B' has no worker"),
        (errors.InvalidRequest("stop: got '10.0.0.7:80'"), "stop: got '10.0.0.7:80'"),
    ],
)  # fmt: skip
def test_errors_to_clients_name_no_inner_address(error, message):
    assert model_errors.client_message(error) == message
    for dialect in (error_dialects.OPENAI, error_dialects.ANTHROPIC, error_dialects.KSERVE):
        assert message.encode() in dialect.body_of(error).replace(b'\\"', b'"')


async def test_log_names_what_the_client_is_not_told(rig, caplog, monkeypatch):
    fresh = logs.PeerLog(logging.getLogger(delivery.__name__), time.monotonic)
    monkeypatch.setattr(delivery, "_failures", fresh)  # a test before may have used its second

    def die(call, _):
        call.fail(errors.EngineFailed("lost 10.0.0.7:41327"))

    rig.one.script = die
    answer = await rig.chat()

    assert answer.status_code == 500
    assert "10.0.0.7" not in answer.text
    assert "a request failed: EngineFailed: lost 10.0.0.7:41327" in caplog.text


@pytest.mark.parametrize("repeated", ["a-", "a.", "a.-", "a+", "a:", "a..", "/a", "1."])
def test_long_message_of_an_engine_is_told_without_delay(repeated):
    error = errors.EngineFailed(f"TensorRT-LLM: no grammar: {repeated * 10_000}! at 10.0.0.7:80")
    began_s = time.process_time()
    message = model_errors.client_message(error)

    assert time.process_time() - began_s < 2.0
    assert "10.0.0.7" not in message


async def test_refused_requests_count_as_those_of_their_key(start):
    limited = KEYS.replace('key = "sk-ann-00001"', 'key = "sk-ann-00001"\ntokens_per_minute = 1')
    rig = await start(limited)
    await rig.ask(ANN)  # which takes more than all tokens of a minute
    statuses = [
        (await rig.ask(ANN)).status_code,
        (await rig.ask(ANN, temperature=9)).status_code,
        (await rig.ask(ANN, model="x")).status_code,
        (
            await rig.client.post("/v1/embeddings", json={"model": "x", "input": "a"}, headers=ANN)
        ).status_code,
    ]
    rows = (await rig.client.get("/usage", headers=ANN)).json()["rows"]

    assert statuses == [429, 400, 404, 404]
    assert sum(row["num_errors"] for row in rows) == 4
    assert {(row["key"], row["tenant"]) for row in rows} == {("ann", "acme")}
