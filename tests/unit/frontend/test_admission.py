"""Admission as clients meet it, over HTTP: API keys, rate limits, busy workers and the waiting queue."""

import asyncio
import json
import logging
import os

import anthropic
import msgspec
import openai
import pytest
from frontend_rig import NAME, outputs

from dynamo.base import errors
from dynamo.frontend.batches import runner
from dynamo.protocols import generate, load
from dynamo.runtime.http import exchange
from waiting import PATIENT_S, until

KEYS = """
[tenants.acme]
concurrent_streams = 1

[[keys]]
name = "alice"
key = "sk-alice-1"
tenant = "acme"

[[keys]]
name = "bob"
key = "sk-bobby-1"
requests_per_minute = 2
models = ["m"]

[[keys]]
name = "tok"
key = "sk-token-1"
tokens_per_minute = 20

[[keys]]
name = "root"
key = "sk-rooty-1"
admin = true
"""


def as_(name):
    return {"authorization": f"Bearer {name}"}


ALICE, BOB, TOK, ROOT = map(as_, ("sk-alice-1", "sk-bobby-1", "sk-token-1", "sk-rooty-1"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def keyed(bare, tmp_path):
    """A frontend with keys, and one worker."""
    bare.keys = tmp_path / "keys.toml"
    bare.keys.write_text(KEYS)
    await bare.start(api_keys_file=str(bare.keys))
    bare.one = await bare.worker()
    bare.ask = lambda headers, **fields: bare.client.post(
        "/v1/chat/completions", json=CHAT | fields, headers=headers
    )
    return bare


def never(call, _):
    """A script that begins and does not end."""
    call.send(generate.Output((104,)))


async def tell_load(rig, worker, *, active, total=100, is_draining=False):
    """The worker publishes its load."""
    topic = f"{NAME.namespace}/{NAME.component}/kv_metrics"
    await worker.runtime.events.advertise(topic)
    metrics = load.ForwardPassMetrics(
        worker_stats=load.WorkerStats(
            request_active_slots=0, request_total_slots=8, num_requests_waiting=0
        ),
        kv_stats=load.KvStats(kv_active_blocks=active, kv_total_blocks=total),
    )
    event = load.LoadEvent(
        worker_id=worker.instance.instance_id, data=metrics, is_draining=is_draining
    )
    worker.runtime.events.publish(topic, msgspec.msgpack.encode(event))


async def busy_rig(rig, **settings):
    """All that comes is refused until the one worker tells something else."""
    await rig.start(active_decode_blocks_threshold=0.5, **settings)
    rig.one = await rig.worker()
    await rig.until(lambda: rig.cluster.bus and rig.frontend._admission.busy_workers._topics)
    await tell_load(rig, rig.one, active=90)
    loads = rig.frontend._admission.busy_workers.loads
    await rig.until(lambda: len(loads))
    return rig


async def test_only_probes_are_answered_without_a_key(keyed):
    answers = {
        path: (await keyed.client.get(path)).status_code
        for path in ("/", "/v1/models", "/live", "/ping", "/health", "/metrics", "/busy_threshold")
    }

    assert answers == {
        "/": 200, "/v1/models": 401, "/busy_threshold": 401,
        "/live": 200, "/ping": 200, "/health": 200, "/metrics": 200,
    }  # fmt: skip
    row = 'dynamo_frontend_admission_rejection_total{gate="api_key",model="unknown"}'
    assert (await keyed.metrics())[row] == 2


async def test_openai_client_raises_its_authentication_error(keyed):
    url = keyed.frontend.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-nobody-1") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-alice-1") as client:
        answer = await client.chat.completions.create(**CHAT)

    assert caught.value.code == "invalid_api_key"
    assert answer.choices[0].message.content == "hello"


async def test_anthropic_client_raises_its_authentication_error(keyed):
    ask = {"model": "m", "max_tokens": 5, "messages": CHAT["messages"]}
    url = keyed.frontend.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-nobody-1") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**ask)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-alice-1") as client:
        answer = await client.messages.create(**ask)

    assert caught.value.body["error"]["type"] == "authentication_error"
    assert answer.content[0].text == "hello"


async def test_key_sees_and_uses_only_its_models(keyed):
    await keyed.worker("other")
    models = (await keyed.client.get("/v1/models", headers=BOB)).json()["data"]
    one = await keyed.client.get("/v1/models/other", headers=BOB)
    answer = await keyed.ask(BOB, model="other")

    assert [model["id"] for model in models] == ["m"]
    assert (one.status_code, answer.status_code) == (404, 404)
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["message"] == (
        "The model 'other' does not exist, or this API key may not ask it. It may ask: 'm'."
    )


async def test_requests_per_minute_are_limited_and_shown_in_headers(keyed):
    answers = [await keyed.ask(BOB) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert (await keyed.ask(ALICE)).status_code == 200


async def test_stream_has_the_rate_limit_headers(keyed):
    answer = await keyed.ask(BOB, stream=True)

    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_unknown_parameter_is_named_beside_the_rate_limit_headers(keyed):
    answer = await keyed.ask(BOB, foo=1)

    assert answer.headers["x-dynamo-ignored-parameters"] == "foo"
    assert answer.headers.get_list("x-ratelimit-remaining-requests") == ["1"]


async def test_answer_without_a_worker_has_the_rate_limit_headers_and_its_id(keyed):
    asked = {"model": "m", "prompt": "hi"}
    answer = await keyed.client.post("/tokenize", json=asked, headers=BOB | {"x-request-id": "7"})

    assert answer.headers.get_list("x-ratelimit-remaining-requests") == ["1"]
    assert answer.headers.get_list("x-request-id") == ["7"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"model": "m", "input": "hi"}), ("/v1/chat/completions", CHAT)],
)
async def test_line_of_a_batch_whose_key_was_removed_is_refused(keyed, path, body):
    request = exchange.Request(
        method="POST",
        path=path,
        query="",
        headers=dict(keyed.frontend._admission.rights.headers_of("removed")),
        body=json.dumps(body).encode(),
        peer="batch",
    )
    line = runner.LineExchange(request)
    await keyed.frontend._app.routes(line)

    assert (await line.response).status == 401
    assert keyed.one.requests == []


async def test_tokens_of_prompt_and_output_are_charged(keyed):
    first, second = await keyed.ask(TOK), await keyed.ask(TOK)

    assert first.headers["x-ratelimit-remaining-tokens"] == str(20 - len("user: hi\n"))
    assert second.status_code == 429
    assert "20 tokens per minute" in second.json()["error"]["message"]


async def test_concurrent_streams_are_limited_per_tenant(keyed):
    keyed.one.script = never
    running = keyed.start_task(keyed.ask(ALICE))
    await keyed.until(lambda: keyed.one.calls)
    keyed.one.script = outputs("hello")
    refused, other = await keyed.ask(ALICE), await keyed.ask(BOB)
    keyed.one.calls[0].send(outputs("i")[0])
    keyed.one.calls[0].finish()
    await running

    assert (refused.status_code, other.status_code) == (429, 200)
    assert refused.headers["retry-after"] == "1"
    assert (await keyed.ask(ALICE)).status_code == 200


async def test_disconnected_client_releases_its_stream(keyed):
    keyed.one.script = never
    async with keyed.client.stream(
        "POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=ALICE
    ) as answer:
        assert answer.status_code == 200
    await keyed.until(lambda: keyed.one.num_cancelled)
    keyed.one.script = outputs("hello")

    assert (await keyed.ask(ALICE)).status_code == 200


async def test_admin_routes_need_an_admin_key(keyed):
    body = {"model": "m", "active_decode_blocks_threshold": 0.9}
    answers = [
        (await keyed.client.post("/busy_threshold", json=body, headers=who)).status_code
        for who in (ALICE, ROOT)
    ]

    assert answers == [403, 200]
    assert (await keyed.client.post("/clear_kv_blocks", headers=ALICE)).status_code == 403


async def test_changed_key_file_is_read_on_reload_and_a_broken_one_is_ignored(keyed, caplog):
    caplog.set_level(logging.INFO, "dynamo")
    keyed.keys.write_text(KEYS + '[[keys]]\nname = "new"\nkey = "sk-newer-1"\n')
    keyed.frontend.reload_keys()
    await keyed.until(lambda: "read 5 API keys" in caplog.text)
    welcome = await keyed.ask(as_("sk-newer-1"))
    keyed.keys.write_text("[[keys]]\nname = 3\n")
    keyed.frontend.reload_keys()
    await keyed.until(lambda: "the keys stay as they were" in caplog.text)
    still = await keyed.ask(as_("sk-newer-1"))

    assert (welcome.status_code, still.status_code) == (200, 200)
    assert "sk-" not in caplog.text


async def test_changed_key_file_is_read_without_a_signal_also_with_an_earlier_time(keyed, caplog):
    caplog.set_level(logging.INFO, "dynamo")
    former = keyed.keys.stat()
    keyed.keys.write_text(KEYS.replace("sk-alice-1", "sk-alice-2"))
    os.utime(keyed.keys, ns=(former.st_atime_ns, former.st_mtime_ns))  # as `rsync -t` sets it
    await until(lambda: "read 4 API keys" in caplog.text)

    assert (await keyed.ask(ALICE)).status_code == 401
    assert (await keyed.ask(as_("sk-alice-2"))).status_code == 200


async def test_removed_key_file_leaves_the_keys_and_is_said(keyed, caplog):
    """Else it would seem that its keys are no longer valid."""
    keyed.keys.unlink()
    await until(lambda: "the keys stay as they were" in caplog.text)

    assert (await keyed.ask(ALICE)).status_code == 200


async def test_frontend_does_not_start_without_its_key_file(bare, tmp_path):
    with pytest.raises(errors.ConfigError, match=r"--api-keys-file .*keys\.toml"):
        await bare.start(api_keys_file=str(tmp_path / "keys.toml"))


@pytest.mark.parametrize(("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_listening_on_a_network_without_keys_is_logged(bare, caplog, host, is_warned):
    await bare.start(http_host=host)

    assert ("without API keys" in caplog.text) == is_warned


async def test_requests_are_refused_while_the_worker_is_busy(bare):
    rig = await busy_rig(bare)
    refused = await rig.chat()
    await tell_load(rig, rig.one, active=10)
    busy_workers = rig.frontend._admission.busy_workers
    await rig.until(lambda: not busy_workers.of_model(rig.frontend.models.find("m")))

    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "All workers are busy, please retry later"
    assert int(refused.headers["retry-after"]) >= 1
    assert (await rig.chat()).status_code == 200


async def test_anthropic_api_answers_529_when_overloaded(bare):
    rig = await busy_rig(bare)
    body = {"model": "m", "max_tokens": 5, "messages": CHAT["messages"]}
    answer = await rig.client.post("/v1/messages", json=body)

    assert answer.status_code == 529
    assert answer.json()["error"]["type"] == "overloaded_error"


async def test_busy_worker_is_avoided_while_another_is_free(bare):
    rig = await busy_rig(bare)
    free = await rig.worker()
    for _ in range(4):
        assert (await rig.chat()).status_code == 200

    assert (len(rig.one.calls), len(free.calls)) == (0, 4)


async def test_named_worker_is_not_used_while_it_is_busy(bare):
    rig = await busy_rig(bare)
    free = await rig.worker()
    busy_id, free_id = (worker.instance.instance_id for worker in (rig.one, free))
    refused = await rig.chat(nvext={"backend_instance_id": busy_id})
    answer = await rig.chat(nvext={"backend_instance_id": free_id})

    assert (refused.status_code, answer.status_code) == (503, 200)
    assert "retry-after" in refused.headers
    assert (len(rig.one.calls), len(free.calls)) == (0, 1)


PENDING = (
    'dynamo_frontend_admission_queue_pending_requests{model="m",policy_class="default",'
    'worker_type="aggregated"}'
)


async def until_queued(rig):
    async with asyncio.timeout(PATIENT_S):
        while (await rig.metrics()).get(PENDING) != 1:
            pass


async def test_queued_request_starts_when_a_worker_is_free(bare):
    rig = await busy_rig(bare, queue_limit=2)
    asking = rig.start_task(rig.chat())
    await until_queued(rig)
    await tell_load(rig, rig.one, active=10)

    assert (await asking).status_code == 200
    assert (await rig.metrics())[PENDING] == 0


async def test_queue_timeout_answers_503(bare):
    rig = await busy_rig(bare, queue_limit=2, queue_timeout_secs=0.01)
    answer = await rig.chat()

    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_client_that_leaves_the_queue_counts_as_disconnected(bare):
    rig = await busy_rig(bare, queue_limit=1)
    asking = rig.start_task(rig.chat())
    await until_queued(rig)
    asking.cancel()
    async with asyncio.timeout(PATIENT_S):
        while not (counts := await rig.metrics())["dynamo_frontend_disconnected_clients"]:
            pass

    assert counts['dynamo_frontend_inflight_requests{model="m"}'] == 0
    assert rig.one.calls == []


async def test_concurrency_limit_is_shown_in_metrics(bare):
    await bare.start(rejection_frontend_request_concurrency_limit=1)
    bare.one = await bare.worker()
    bare.one.script = never
    bare.start_task(bare.chat())
    await bare.until(lambda: bare.one.calls)
    refused = await bare.chat()
    counts = await bare.metrics()

    assert refused.status_code == 503
    assert counts['dynamo_frontend_admission_gate_limit{gate="request_concurrency"}'] == 1


async def test_thresholds_are_read_and_changed_at_run_time(rig):
    names = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold",
             "active_prefill_tokens_threshold_frac")  # fmt: skip
    before = (await rig.client.get("/busy_threshold")).json()
    body = {"model": "m", "active_decode_blocks_threshold": 0.9}
    first = (await rig.client.post("/busy_threshold", json=body)).json()
    body = {"model": "m", "active_prefill_tokens_threshold": 5}
    second = (await rig.client.post("/busy_threshold", json=body)).json()
    body = {"model": "m", "active_decode_blocks_threshold": None}
    third = (await rig.client.post("/busy_threshold", json=body)).json()

    assert before == {"thresholds": [{"model": "m", **dict.fromkeys(names)}]}
    assert first == {"model": "m", names[0]: 0.9, names[1]: None, names[2]: None}
    assert second == {"model": "m", names[0]: 0.9, names[1]: 5, names[2]: None}
    assert third == {"model": "m", names[0]: None, names[1]: 5, names[2]: None}
    assert (await rig.client.get("/busy_threshold")).json() == {"thresholds": [third]}


async def test_threshold_set_at_run_time_applies(rig):
    body = {"model": "m", "active_decode_blocks_threshold": 0.5}
    await rig.client.post("/busy_threshold", json=body)
    await rig.until(lambda: rig.frontend._admission.busy_workers._topics)
    await tell_load(rig, rig.one, active=90)
    await rig.until(lambda: len(rig.frontend._admission.busy_workers.loads))

    assert (await rig.chat()).status_code == 503


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "model", "required"),
        (
            {"model": "m", "active_decode_blocks_threshold": 2},
            400,
            "active_decode_blocks_threshold",
            "a number from 0 to 1, got 2",
        ),
        (
            {"model": "m", "active_prefill_tokens_threshold": -1},
            400,
            "active_prefill_tokens_threshold",
            "a whole number from 0, got -1",
        ),
        ({"model": "m", "busy": 1}, 400, "busy", "Unsupported"),
        ({"model": "x"}, 404, "model", "does not exist"),
    ],
)
async def test_invalid_threshold_is_refused(rig, body, status, param, words):
    answer = await rig.client.post("/busy_threshold", content=json.dumps(body))

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
