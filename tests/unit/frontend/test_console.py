"""The API of the console: what each viewer sees, its events, and what is kept of requests."""

import asyncio
import csv
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import threading
import types

import msgspec
import pytest
from frontend_rig import NAME
from tests.unit.frontend.test_admission import tell_load

from dynamo.base import errors
from dynamo.console import usage
from dynamo.frontend.console import api, feed
from dynamo.protocols import generate, instances, planner_report
from dynamo.router import config, route

KEYS = """
[[keys]]
name = "root"
key = "sk-root-1"
admin = true
[[keys]]
name = "alice"
key = "sk-alice-1"
models = ["m"]
[[keys]]
name = "bob"
key = "sk-bob-12"
models = ["other"]
[[keys]]
name = "carol"
key = "sk-carol-1"
models = ["Big"]
"""
API = "/console/api"


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def keyed(bare, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path))
    bare.one = await bare.worker()
    return bare


async def get(rig, path, key=None, status=200):
    answer = await rig.client.get(path, headers=bearer(key) if key else {})

    assert answer.status_code == status, answer.text
    return answer.json()


async def follow(rig, views, num_frames=1, key=None):
    """The events of the first frames, as (name, value)."""
    found = []
    headers = bearer(key) if key else {}
    async with rig.client.stream("GET", f"{API}/events?views={views}", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) >= num_frames:
                    return found
    return found


async def test_page_and_its_files_have_a_strict_policy(rig):
    for path, kind in (("/", "html"), ("/console", "html"), ("/console/app.js", "javascript"),
                       ("/console/app.css", "css"), ("/console/icon.svg", "svg")):  # fmt: skip
        answer = await rig.client.get(path)

        assert (answer.status_code, kind in answer.headers["content-type"]) == (200, True)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    page = (await rig.client.get("/")).text
    assert "<script>" not in page
    assert "://" not in page


async def test_request_is_listed_with_its_stages_and_worker(rig):
    await rig.chat(stream=True)
    page = await get(rig, f"{API}/requests")
    (row,) = page["rows"]

    assert (page["total"], page["num_open"]) == (1, 0)
    assert (row["model"], row["endpoint"], row["state"]) == ("m", "chat_completions", "done")
    assert row["request_type"] == "stream"
    assert row["output_tokens"] == 5
    assert row["worker"] == f"{rig.one.instance.instance_id:x}"
    parts = [row[f"{name}_ms"] for name in ("prepare", "route", "prefill", "decode")]
    assert sum(parts) == pytest.approx(row["total_ms"], abs=0.01)
    assert "hi" not in json.dumps(page)


async def test_request_in_flight_is_listed_first_and_found_by_its_id(rig):
    await rig.chat()
    rig.one.script = lambda call, _: call.send(generate.Output((104,)))
    asked = rig.start_task(
        rig.client.post(
            "/v1/completions", json={"model": "m", "prompt": "x"}, headers={"x-request-id": "a/b?"}
        )
    )
    await rig.until(lambda: len(rig.one.calls) == 2)
    page = await get(rig, f"{API}/requests")
    row = await get(rig, f"{API}/requests/a%2Fb%3F")
    asked.cancel()

    assert [one["state"] for one in page["rows"]] == [row["state"], "done"]
    assert row["state"] in ("prefill", "streaming")
    assert len((await get(rig, f"{API}/requests?state=done"))["rows"]) == 1
    message = (await get(rig, f"{API}/requests/nobody", status=404))["error"]["message"]
    assert "kept" in message


async def test_worker_is_listed_with_its_load_while_a_console_is_open(rig):
    worker = rig.one
    async with rig.client.stream("GET", f"{API}/events?views=topology") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        recorder = rig.frontend._recorder
        topic = f"{NAME.namespace}/{NAME.component}/kv_metrics"
        await rig.until(lambda: rig.cluster.bus)
        while recorder.load_of(worker.instance.instance_id) is None:
            await tell_load(rig, worker, active=7)
            await asyncio.sleep(0.01)
        page = await get(rig, f"{API}/topology")
    (row,) = page["workers"]

    assert topic
    assert (row["instance"], row["model"], row["role"]) == (
        f"{worker.instance.instance_id:x}", "m", "aggregated"
    )  # fmt: skip
    assert (row["kv_active_blocks"], row["kv_total_blocks"]) == (7, 100)
    assert page["num_by_state"] == {"ready": 1}
    await rig.until(lambda: not recorder.num_viewers)
    await rig.until(lambda: recorder.load_of(worker.instance.instance_id) is None)


async def test_worker_that_left_is_draining_while_it_says_so(rig):
    worker, recorder = rig.one, rig.frontend._recorder
    number = worker.instance.instance_id
    async with rig.client.stream("GET", f"{API}/events?views=topology") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        while recorder.load_of(number) is None:
            await tell_load(rig, worker, active=7, is_draining=True)
            await asyncio.sleep(0.01)
        (listed,) = (await get(rig, f"{API}/topology"))["workers"]
        await worker.runtime.records.deregister()
        await rig.until(lambda: not rig.instances)
        (left,) = (await get(rig, f"{API}/topology"))["workers"]
        recorder._loads.clear()
        (gone,) = (await get(rig, f"{API}/topology"))["workers"]

    assert [row["state"] for row in (listed, left, gone)] == ["draining", "draining", "gone"]
    assert left["kv_active_blocks"] == 7


async def test_sleeping_worker_is_shown_as_asleep_though_no_console_saw_it_go(rig):
    start = instances.WorkerStart(
        model="m",
        namespace="dynamo",
        estimate_s=3.0,
        sleeper=instances.SleepingInstance(instance_id=10, role="decode", endpoint="dyn://a.b.c"),
    )
    await rig.one.runtime.discovery.put(f"{instances.STARTS}a", msgspec.json.encode(start))
    await rig.until(lambda: rig.frontend._expected_workers.sleeping)
    page = await get(rig, f"{API}/topology")

    assert page["num_by_state"] == {"asleep": 1, "ready": 1}
    assert page["starting"] == []
    states = {(row["instance"], row["role"]): row.get("state") for row in page["workers"]}
    assert states["a", "decode"] == "asleep"


async def put_frontend(rig, **fields):
    """Let another frontend be in discovery."""
    defaults = {"instance_id": 7, "namespace": "", "host": "there", "url": "http://there:80",
                "router_mode": "kv"}  # fmt: skip
    record = instances.FrontendRecord(**defaults | fields)
    await rig.one.runtime.discovery.put(record.key, msgspec.json.encode(record))


async def test_other_frontends_and_routers_are_listed(rig):
    await put_frontend(rig)
    await put_frontend(rig, instance_id=8, is_draining=True)
    name = instances.EndpointName("dynamo", "router", "generate")
    router = await rig.one.runtime.register(name, lambda call: None)
    await rig.one.runtime.discovery.put(f"{instances.FRONTENDS}9", b"{}")  # of another version
    page = await get(rig, f"{API}/topology")
    own, *others = page["processes"]

    assert own["is_self"]
    assert own["address"] == rig.frontend.url
    assert [(row["kind"], row["instance"], row.get("state")) for row in others] == [
        ("frontend", "7", None), ("frontend", "8", "draining"), ("router", f"{router.instance_id:x}", None)
    ]  # fmt: skip
    assert page["num_processes"] == {"frontend": 3, "router": 1}


async def test_frontend_is_in_discovery_until_it_ends(rig):
    async def read():
        found = await rig.one.runtime.discovery.get_prefix(instances.FRONTENDS)
        return [
            msgspec.json.decode(value, type=instances.FrontendRecord) for value in found.values()
        ]

    async def is_told_to_drain():
        return (await read())[0].is_draining

    (before,) = await read()
    await rig.frontend.drain()
    await rig.until(is_told_to_drain)
    await rig.frontend.__aexit__(None, None, None)

    assert (before.url, before.is_draining) == (rig.frontend.url, False)
    assert await read() == []


async def test_key_without_administration_sees_the_frontend_that_answers_only(keyed):
    await put_frontend(keyed)
    seen = {
        key: len((await get(keyed, f"{API}/topology", key))["processes"])
        for key in ("sk-root-1", "sk-alice-1")
    }

    assert seen == {"sk-root-1": 2, "sk-alice-1": 1}


async def test_models_on_demand_are_listed_whether_they_are_loaded_or_not(keyed):
    for number, (name, failure) in enumerate((("m", ""), ("other", "no such weights"))):
        start = instances.WorkerStart(model=name, namespace="dynamo", estimate_s=12.0, is_on_demand=True,
                                      context_length=99, failure=failure)  # fmt: skip
        key = f"{instances.STARTS}a-{number}-0"
        await keyed.one.runtime.discovery.put(key, msgspec.json.encode(start))
    await keyed.until(lambda: len(keyed.frontend._expected_workers.on_demand) == 2)
    rows = {
        row["name"]: [row["num_workers"], row["is_on_demand"], row.get("failure")]
        for row in (await get(keyed, f"{API}/models", "sk-root-1"))["models"]
    }
    seen = [row["name"] for row in (await get(keyed, f"{API}/models", "sk-bob-12"))["models"]]

    assert rows == {"m": [1, True, None], "other": [0, True, "no such weights"]}
    assert seen == ["other"]


async def test_prefill_of_a_request_is_a_transfer(rig):
    await rig.chat()
    (meter,) = rig.frontend._recorder.recent
    meter.record_prefill(route.PrefillResult(10, 0.0))
    (transfer,) = (await get(rig, f"{API}/topology"))["transfers"]

    assert (transfer["prefill"], transfer["decode"]) == ("a", f"{rig.one.instance.instance_id:x}")
    assert (transfer["num_open"], transfer["num_recent"]) == (0, 1)


async def test_prefill_by_another_worker_is_no_time_of_the_router(rig):
    await rig.chat()
    (meter,) = rig.frontend._recorder.recent
    meter.prepared_at, meter.opened_at, meter.first_token_at = 11.0, 14.0, 15.0
    meter.record_prefill(route.PrefillResult(10, 2.5))
    (row,) = (await get(rig, f"{API}/requests"))["rows"]

    assert (row["route_ms"], row["prefill_ms"]) == (500.0, 3500.0)


async def test_nothing_is_computed_while_no_console_is_open(rig):
    recorder = rig.frontend._recorder

    assert not recorder.wants_explanation()
    await follow(rig, "requests")
    await rig.until(lambda: not recorder.num_viewers)
    assert not recorder.wants_explanation()
    assert rig.frontend._console.feed._running == []


async def test_decision_is_explained_while_a_console_is_open(bare):
    await bare.start(config.RoutingConfig(router_mode="kv"))
    bare.one = await bare.worker()
    async with bare.client.stream("GET", f"{API}/events?views=requests") as answer:
        await anext(answer.aiter_lines())
        await bare.chat("x" * 100)
    rows = (await get(bare, f"{API}/requests"))["rows"]
    row = await get(bare, f"{API}/requests/{rows[0]['id']}")
    (decision,) = row["decisions"]
    cache = await get(bare, f"{API}/cache")

    assert decision["policy"] == "EstimatedTtft"
    assert [one["instance"] for one in decision["candidates"]] == [row["worker"]]
    assert decision["candidates"][0]["cost"] > 0
    assert cache["is_indexed"]
    assert [one["num_prompts"] for one in cache["prefixes"]] == [1]


async def test_prefix_is_held_by_workers_of_its_own_model(bare):
    """Models with one tokenizer have the same hashes for the same text."""
    await bare.start(config.RoutingConfig(router_mode="kv"))
    own, other = [await bare.worker(name) for name in ("M", "other")]
    names = [f"{each.instance.instance_id:x}" for each in (own, other)]
    views = bare.frontend._console.views
    found = {"device": dict.fromkeys(names, 1)}
    views._sources = dataclasses.replace(views._sources, find_matches=lambda hashes: found)
    views.recorder.prompts.add("m", [7])
    (prefix,) = (await get(bare, f"{API}/cache"))["prefixes"]

    assert prefix["blocks_by_tier"] == {"device": {names[0]: 1}}


async def test_client_asks_for_the_explanation_by_header_or_field(bare):
    await bare.start(config.RoutingConfig(router_mode="kv"))
    await bare.worker()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answers = [
        await bare.client.post(
            "/v1/chat/completions", json=body, headers={"x-dynamo-explain": "1"}
        ),
        await bare.chat(nvext={"extra_fields": ["explanation"]}),
    ]

    for answer in answers:
        (decision,) = answer.json()["nvext"]["explanation"]
        assert decision["num_candidates"] == 1


async def test_route_in_turn_is_explained_too(rig):
    answer = await rig.chat(nvext={"extra_fields": ["explanation"]})

    assert "round-robin" in answer.json()["nvext"]["explanation"][0]["reason"]


async def test_explanations_are_limited_while_a_console_is_open(rig):
    recorder = rig.frontend._recorder
    async with rig.client.stream("GET", f"{API}/events?views=requests") as answer:
        await anext(answer.aiter_lines())
        recorder._explain_second = recorder.clock.now() // 1
        recorder._num_explained = 10**6

        assert not recorder.wants_explanation() or recorder._num_explained < 10**6


async def test_metrics_of_the_last_hour_come_by_model(rig):
    recorder, frontend_metrics = rig.frontend._recorder, rig.frontend._metrics
    recorder.sample(frontend_metrics)
    await rig.chat()
    await rig.client.post("/v1/chat/completions", json={"model": "m"})
    recorder.sample(frontend_metrics)
    page = await get(rig, f"{API}/metrics?model=m")
    total = await get(rig, f"{API}/metrics")

    assert "m" in page["models"]
    assert total["points"][-1]["output_tokens_per_s"] > 0
    assert total["points"][-1]["errors_per_s"] > 0
    assert total["points"][-1]["ttft_p50"] > 0
    assert [name for name, _ in await follow(rig, "metrics")] == ["metrics"]


async def test_models_are_listed_by_their_cards(rig):
    (row,) = (await get(rig, f"{API}/models"))["models"]

    assert (row["name"], row["kind"], row["num_workers"]) == ("m", "text", 1)
    assert row["context_length"] == 200
    assert "tokenizer.json" in row["files"]
    assert "messages" in row["chat_template"]


async def test_parser_that_the_chat_template_decides_is_named(bare, tmp_path):
    bare.model_dir = shutil.copytree(bare.model_dir, tmp_path / "model")
    calls = "<tool_call>{% for message in messages %}{{ message.content }}{% endfor %}"
    (bare.model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": calls}))
    await bare.start()
    await bare.worker()
    (row,) = (await get(bare, f"{API}/models"))["models"]

    assert row["tool_call_parser"] == "as the chat template shows"
    assert "reasoning_parser" not in row


async def test_usage_is_summed_and_given_as_csv(rig):
    await rig.chat()
    await rig.complete()
    rows = (await get(rig, "/usage"))["rows"]
    answer = await rig.client.get("/usage?format=csv&model=m")
    lines = list(csv.DictReader(answer.text.splitlines()))

    assert {row["api"]: row["num_requests"] for row in rows} == {
        "chat_completions": 1, "completions": 1
    }  # fmt: skip
    assert answer.headers["content-type"].startswith("text/csv")
    assert [int(line["output_tokens"]) for line in lines] == [5, 5]
    assert (await get(rig, "/usage?since=9999-01-01"))["rows"] == []


async def test_usage_survives_a_restart(bare, tmp_path):
    path = tmp_path / "usage.json"
    await bare.start(usage_file=str(path))
    await bare.worker()
    await bare.chat()
    bare.frontend._recorder.write_usage()
    await bare.start(usage_file=str(path))

    assert [row["num_requests"] for row in (await get(bare, "/usage"))["rows"]] == [1]
    assert (await get(bare, f"{API}/session"))["keeps_usage"]
    assert len(msgspec.json.decode(path.read_bytes(), type=list[usage.UsageRow])) == 1


async def test_usage_is_written_by_one_thread_at_a_time(bare, tmp_path, monkeypatch):
    await bare.start(usage_file=str(tmp_path / "usage.json"))
    await bare.worker()
    await bare.chat()
    write, num_begun = bare.frontend._recorder.write_usage, []
    write_whole = pathlib.Path.write_bytes

    def write_bytes(path, content):
        num_begun.append(1)
        if len(num_begun) == 1:
            second.start()
            second.join(0.05)
            assert len(num_begun) == 1
        return write_whole(path, content)

    monkeypatch.setattr(pathlib.Path, "write_bytes", write_bytes)
    second = threading.Thread(target=write)
    write()
    second.join()

    assert (tmp_path / "usage.json").exists()


async def test_usage_is_on_the_disk_before_it_replaces_the_former(bare, tmp_path, monkeypatch):
    await bare.start(usage_file=str(tmp_path / "usage.json"))
    await bare.worker()
    await bare.chat()
    sync, sizes = os.fsync, []

    def sync_new(number):
        sizes.append((os.fstat(number).st_size, (tmp_path / "usage.json").exists()))
        sync(number)

    monkeypatch.setattr(os, "fsync", sync_new)
    bare.frontend._recorder.write_usage()

    assert sizes == [((tmp_path / "usage.json").stat().st_size, False)]


async def test_file_of_usage_in_no_directory_is_refused_at_the_start(bare, tmp_path):
    with pytest.raises(errors.ConfigError, match="expected a file in a directory that exists"):
        await bare.start(usage_file=str(tmp_path / "no" / "usage.json"))


async def test_log_has_the_last_lines(rig):
    logging.getLogger("dynamo.test").warning("a line")
    lines = (await get(rig, f"{API}/log?level=INFO"))["lines"]

    assert lines[-1]["message"] == "a line"
    ((name, sent),) = await follow(rig, "log")
    assert name == "log"
    assert sent[-1]["number"] >= lines[-1]["number"]


@pytest.mark.parametrize(
    "query",
    [
        *("requests?limit=0", "requests?status=failed", "topology?role=prefill", "log?level=LOUD"),
        *("events?views=secrets", "session?x=1"),
    ],
)
async def test_wrong_query_is_refused(rig, query):
    assert (await get(rig, f"{API}/{query}", status=400))["error"]["code"] == "invalid_request"


async def test_planner_that_acts_comes_before_one_that_has_decided_nothing_yet(rig, monkeypatch):
    workers = planner_report.Workers(0, 1)
    decision = planner_report.PlannerDecision(
        time=1.0, outcome="hold", is_leader=True, present=workers, replicas=workers, reason="x"
    )
    planners = rig.frontend._console.planners
    planners._clients = {NAME.namespace: types.SimpleNamespace(instances=[(), (decision,)])}

    async def answer(_, decisions, __):
        return planner_report.PlannerReport(
            namespace="dynamo", policy="load", mode="agg", interval_s=180.0, decisions=decisions
        )

    monkeypatch.setattr(planners, "_ask_one", answer)
    page = await get(rig, f"{API}/planner")

    assert [len(report["decisions"]) for report in page["planners"]] == [1, 0]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("since=yesterday", "since: expected a string like "),
        ("day=today", "Unsupported parameter(s): `day`"),
        ("format=xml", "format: expected 'csv' or 'json', got a string ('xml')"),
    ],
)
async def test_wrong_query_for_usage_is_refused_in_words(rig, query, message):
    refusal = (await get(rig, f"/usage?{query}", status=400))["error"]

    assert refusal["message"].startswith(message)


async def test_usage_and_metrics_of_a_model_with_capital_letters_are_found_by_its_name(bare):
    await bare.start()
    await bare.worker("Big")
    await bare.client.post("/v1/completions", json={"model": "Big", "prompt": "hi"})
    for _ in range(2):
        bare.frontend._recorder.sample(bare.frontend._metrics)

    assert [row["num_requests"] for row in (await get(bare, "/usage?model=Big"))["rows"]] == [1]
    assert (await get(bare, f"{API}/metrics?model=Big"))["points"]
    assert (await get(bare, f"{API}/requests?model=Big"))["total"] == 1


async def test_streams_are_bounded_and_end_with_the_frontend(rig, monkeypatch):
    monkeypatch.setattr(feed, "MAX_STREAMS", 1)
    async with rig.client.stream("GET", f"{API}/events?views=requests") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        refused = await get(rig, f"{API}/events", status=503)
        rig.frontend._console.feed.end_all()
        async for _ in lines:
            pass

    assert "1 consoles are open" in refused["error"]["message"]
    assert (await rig.client.head(f"{API}/events")).status_code == 200


async def test_without_a_key_nothing_is_shown(keyed):
    paths = ("session", "topology", "requests", "metrics", "models", "cache", "log", "events")
    statuses = [(await keyed.client.get(f"{API}/{path}")).status_code for path in paths]

    assert set(statuses) == {401}
    assert (await keyed.client.get("/usage")).status_code == 401
    assert (await keyed.client.get("/")).status_code == 200


async def test_key_sees_its_own_requests_only(keyed):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for key in ("sk-alice-1", "sk-root-1"):
        await keyed.client.post("/v1/chat/completions", json=body, headers=bearer(key))
    seen = {
        key: [row["key"] for row in (await get(keyed, f"{API}/requests", key))["rows"]]
        for key in ("sk-alice-1", "sk-root-1", "sk-bob-12")
    }
    used = {
        key: {row["key"] for row in (await get(keyed, "/usage", key))["rows"]}
        for key in ("sk-alice-1", "sk-root-1")
    }
    foreign = (await get(keyed, f"{API}/requests", "sk-root-1"))["rows"][0]["id"]

    assert seen == {"sk-alice-1": ["alice"], "sk-root-1": ["root", "alice"], "sk-bob-12": []}
    assert used == {"sk-alice-1": {"alice"}, "sk-root-1": {"alice", "root"}}
    await get(keyed, f"{API}/requests/{foreign}", "sk-alice-1", status=404)
    ((_, page),) = await follow(keyed, "requests", key="sk-alice-1")
    assert [row["key"] for row in page["rows"]] == ["alice"]


async def test_key_sees_its_models_only(keyed):
    assert (await get(keyed, f"{API}/models", "sk-bob-12"))["models"] == []
    assert (await get(keyed, f"{API}/topology", "sk-bob-12"))["workers"] == []
    await get(keyed, f"{API}/metrics?model=m", "sk-bob-12", status=403)


async def test_key_sees_the_metrics_of_a_model_with_capital_letters(keyed):
    await keyed.worker("Big")
    await keyed.client.post(
        "/v1/completions", json={"model": "Big", "prompt": "hi"}, headers=bearer("sk-carol-1")
    )
    keyed.frontend._recorder.sample(keyed.frontend._metrics)
    keyed.frontend._recorder.sample(keyed.frontend._metrics)

    assert (await get(keyed, f"{API}/metrics", "sk-carol-1"))["models"] == ["big"]
    assert (await get(keyed, f"{API}/metrics?model=big", "sk-carol-1"))["points"]


async def test_log_and_cache_are_for_administrators(keyed):
    for name in ("log", "cache"):
        await get(keyed, f"{API}/{name}", "sk-alice-1", status=403)
        await get(keyed, f"{API}/events?views={name}", "sk-alice-1", status=403)
        await get(keyed, f"{API}/{name}", "sk-root-1")
    assert (await get(keyed, f"{API}/session", "sk-root-1"))["may_administer"]
    assert not (await get(keyed, f"{API}/session", "sk-alice-1"))["may_administer"]


@pytest.mark.parametrize("content", ["", KEYS.replace("admin = true", "")])
async def test_stream_ends_when_its_key_may_no_longer_see_it(keyed, tmp_path, content):
    following = keyed.start_task(follow(keyed, "log", 10**6, "sk-root-1"))
    await keyed.until(lambda: keyed.frontend._recorder.num_viewers)
    (tmp_path / "keys.toml").write_text(content)
    keyed.frontend.reload_keys()
    await keyed.until(following.done)

    assert not keyed.frontend._recorder.num_viewers


def test_query_of_a_url_is_decoded_by_type():
    assert api.decode_query("after=3&level=INFO", api.LogQuery).after == 3


async def test_of_ended_requests_few_decisions_and_no_hashes_are_kept(bare):
    await bare.start(config.RoutingConfig(router_mode="kv"))
    await bare.worker()
    asked = {"extra_fields": ["explanation"]}
    answer = await bare.complete(["x" * 100] * 40, nvext=asked)
    (meter,) = bare.frontend._recorder.recent

    assert len(answer.json()["nvext"]["explanation"]) == 40
    assert 0 < len(meter.explanations) < 40
    assert not any(hashes for _, hashes in meter.explanations)
