"""A key that may ask some models only learns of no other: by no list, no error and no status."""

import asyncio

import msgspec
import pytest
from frontend_rig import NAME, Worker

from dynamo.protocols import instances

KEYS = """
[[keys]]
name = "few"
key = "sk-few-12345"
models = ["m"]

[[keys]]
name = "all"
key = "sk-all-12345"
"""
FEW = {"authorization": "Bearer sk-few-12345"}
ALL = {"authorization": "Bearer sk-all-12345"}
SAY = [{"role": "user", "content": "hi"}]
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
SECRET, UNKNOWN = "secret", "unheard"


@pytest.fixture
async def keyed(bare, tmp_path):
    """A frontend with keys, a worker for "m", which has an alias, and one for "secret"."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path), worker_wait_secs=0.2)
    bare.one = await bare.worker("m", aliases=("mine",))
    bare.two = await bare.worker(SECRET, aliases=("hidden",))
    return bare


ROUTES = {
    "/v1/chat/completions": {"messages": SAY},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": SAY, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": SAY},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/api/chat": {"messages": SAY},
    "/api/generate": {},
    "/api/show": {},
}


async def ask(rig, path, model):
    """The status of the answer and its body, in which the name of the model is NAME."""
    if path in ROUTES:
        answer = await rig.client.post(path, json={"model": model, **ROUTES[path]}, headers=FEW)
    elif path.endswith("infer"):
        answer = await rig.client.post(path.format(model), json=INFER, headers=FEW)
    else:
        answer = await rig.client.get(path.format(model), headers=FEW)
    return answer.status_code, answer.text.replace(model, "NAME")


PATHS = (*ROUTES, "/v1/models/{}", "/v2/models/{}", "/v2/models/{}/ready", "/v2/models/{}/infer")


@pytest.mark.parametrize("path", PATHS)
async def test_model_that_a_key_may_not_ask_is_answered_as_an_unknown_one(keyed, path):
    unknown = await ask(keyed, path, UNKNOWN)

    assert unknown[0] == 404
    assert SECRET not in unknown[1]
    assert "'m'" in unknown[1]
    assert await ask(keyed, path, SECRET) == unknown
    assert await ask(keyed, path, "hidden") == unknown
    assert keyed.two.calls == []


@pytest.mark.parametrize("path", PATHS)
async def test_key_does_not_learn_that_a_foreign_model_has_lost_its_workers(keyed, path):
    await keyed.two.runtime.records.withdraw()
    await keyed.until(lambda: keyed.frontend.models.get(SECRET) is None)

    assert await ask(keyed, path, SECRET) == await ask(keyed, path, UNKNOWN)
    assert await ask(keyed, path, "hidden") == await ask(keyed, path, UNKNOWN)


@pytest.mark.parametrize("path", PATHS)
async def test_key_does_not_learn_of_a_foreign_model_on_demand(keyed, path):
    start = instances.WorkerStart(
        model="dormant", namespace="dynamo", estimate_s=9.0, is_on_demand=True, context_length=9
    )
    await keyed.one.runtime.discovery.put(f"{instances.STARTS}1", msgspec.json.encode(start))
    await keyed.until(lambda: keyed.frontend._expected_workers.on_demand)

    assert await ask(keyed, path, "dormant") == await ask(keyed, path, UNKNOWN)


async def test_key_without_limits_is_told_of_all_models(keyed):
    body = {"model": UNKNOWN, "messages": SAY}
    answer = await keyed.client.post("/v1/chat/completions", json=body, headers=ALL)

    assert answer.json()["error"]["message"] == (
        f"The model 'unheard' does not exist. Served here: 'm', '{SECRET}'."
    )


async def test_key_asks_its_model_by_an_alias(keyed):
    body = {"model": "mine", "messages": SAY}
    answer = await keyed.client.post("/v1/chat/completions", json=body, headers=FEW)

    assert (answer.status_code, answer.json()["model"]) == (200, "m")


async def test_key_waits_for_its_model_by_an_alias_while_the_model_is_loaded(bare, tmp_path):
    path, may_load = tmp_path / "keys.toml", asyncio.Event()
    path.write_text(KEYS)
    await bare.start(api_keys_file=str(path))
    load = bare.frontend.models._load

    async def load_late(records):
        await may_load.wait()
        return await load(records)

    bare.frontend.models._load = load_late
    await bare.register(Worker, "m", NAME, aliases=("mine",))
    body = {"model": "mine", "messages": SAY}
    answer = bare.start_task(bare.client.post("/v1/chat/completions", json=body, headers=FEW))
    await bare.until(lambda: bare.frontend._dispatcher.worker_wait._waiting)
    may_load.set()

    assert (await answer).status_code == 200


async def test_tokens_without_a_model_are_those_of_the_only_one_that_the_key_may_ask(keyed):
    own = await keyed.client.post("/tokenize", json={"prompt": "hi"}, headers=FEW)
    two = await keyed.client.post("/tokenize", json={"prompt": "hi"}, headers=ALL)
    await keyed.one.runtime.records.withdraw()
    await keyed.until(lambda: keyed.frontend.models.get("m") is None)
    none = await keyed.client.post("/detokenize", json={"tokens": [104]}, headers=FEW)

    assert own.json()["count"] == 2
    assert f"Served here: 'm', '{SECRET}'." in two.json()["error"]["message"]
    assert none.json()["error"]["message"].endswith("Served here: none.")


@pytest.mark.parametrize("path", ["/busy_threshold", "/docs", "/v1/models", "/api/tags", "/api/ps"])
async def test_lists_and_pages_name_no_model_that_the_key_may_not_ask(keyed, path):
    shown = (await keyed.client.get(path, headers=FEW)).text
    await keyed.one.runtime.records.withdraw()
    await keyed.until(lambda: keyed.frontend.models.get("m") is None)
    alone = (await keyed.client.get(path, headers=FEW)).text

    assert '"m"' in shown.replace("&quot;", '"')
    assert SECRET not in shown + alone
