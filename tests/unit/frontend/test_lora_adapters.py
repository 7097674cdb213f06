"""LoRA adapters are models: they come and go with the workers that have them."""

import msgspec
import pytest
from frontend_rig import Worker

import kv_params
from dynamo.disagg import config as disagg_config
from dynamo.protocols import generate, instances, kv_transfer, model_card
from dynamo.router import config

OTHER = instances.EndpointName("dynamo", "other", "generate")
PREFILL = instances.EndpointName("dynamo", "prefill", "generate")


async def parents(rig):
    """What is listed: names, and the models behind them."""
    listed = (await rig.client.get("/v1/models")).json()["data"]
    return {model["id"]: model.get("parent") for model in listed}


def served(rig):
    return {model.name for model in rig.frontend.models.ready}


@pytest.fixture
async def poetic(impatient):
    """Beside a worker without adapters, one that has two."""
    impatient.poet = await impatient.worker(lora_names=("poet", "clerk"))
    return impatient


async def test_adapter_is_listed_with_its_base_model(poetic):
    shown = (await poetic.client.get("/v1/models/poet")).json()

    assert await parents(poetic) == {"clerk": "m", "m": None, "poet": "m"}
    assert (shown["id"], shown["parent"], shown["context_window"]) == ("poet", "m", 200)


@pytest.mark.parametrize("mode", ["round-robin", "random", "kv"])
async def test_adapter_request_goes_to_a_worker_with_the_adapter(bare, mode):
    await bare.start(routing=config.RoutingConfig(router_mode=mode))
    plain, poet = await bare.worker(), await bare.worker(lora_names=("poet",))
    answers = [await bare.chat(model="poet") for _ in range(4)]
    answers += [await bare.chat(model="m") for _ in range(4)]

    assert [one.json()["model"] for one in answers] == ["poet"] * 4 + ["m"] * 4
    assert [one.lora_name for one in poet.requests].count("poet") == 4
    assert "poet" not in [one.lora_name for one in plain.requests]


async def test_worker_with_an_adapter_serves_its_base_model_too(bare):
    await bare.start()
    poet = await bare.worker(lora_names=("poet",))
    for model in ("m", "poet", "m"):
        await bare.chat(model=model)

    assert [one.lora_name for one in poet.requests] == [None, "poet", None]


async def test_every_api_serves_adapters(poetic):
    say = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"model": "poet", "prompt": "hi"},
        "/v1/messages": {"model": "poet", "messages": say, "max_tokens": 9},
        "/v1/responses": {"model": "poet", "input": "hi"},
        "/v2/models/poet/generate": {"text_input": "hi"},
    }
    answers = [await poetic.client.post(path, json=body) for path, body in bodies.items()]

    assert [one.status_code for one in answers] == [200] * 4, answers
    assert [one.json().get("model", one.json().get("model_name")) for one in answers] == [
        "poet"
    ] * 4
    assert [one.lora_name for one in poetic.poet.requests] == ["poet"] * 4
    assert not poetic.one.requests


async def test_adapters_share_the_tokenizer_of_the_base_model(poetic):
    find = poetic.frontend.models.find

    assert find("poet").preparer._tokenizer is find("m").preparer._tokenizer
    assert find("poet").fingerprint != find("m").fingerprint


async def test_unknown_adapter_name_is_not_found(poetic):
    answer = await poetic.chat(model="singer")

    assert answer.status_code == 404
    assert "'clerk', 'm', 'poet'" in answer.json()["error"]["message"]


async def test_adapter_vanishes_with_its_last_worker_and_returns_with_another(poetic):
    await poetic.poet.runtime.close()
    await poetic.until(lambda: served(poetic) == {"m"})
    answers = [await poetic.chat(model="poet"), await poetic.chat()]
    counted = await poetic.metrics()
    again = await poetic.worker(lora_names=("poet",))
    await poetic.until(lambda: served(poetic) == {"m", "poet"})
    answers.append(await poetic.chat(model="poet"))

    assert [one.status_code for one in answers] == [503, 200, 200]
    assert counted['dynamo_frontend_model_workers{model="poet"}'] == 0
    assert len(again.requests) == 1


async def change(worker, *lora_names):
    """It has these from now on."""
    card = msgspec.structs.replace(worker.card, lora_names=lora_names)
    await worker.runtime.records.change(
        worker.instance.card_key, lambda _: card.record_for(worker.instance)[1]
    )


async def test_unloaded_adapter_is_not_found_and_lost_adapter_is_awaited(
    poetic,
):
    other = await poetic.worker(lora_names=("poet",))
    await poetic.until(lambda: len(poetic.frontend.models.find("poet").instances) == 2)
    await change(poetic.poet, "clerk")
    await poetic.until(lambda: len(poetic.frontend.models.find("poet").instances) == 1)
    answers = [await poetic.chat(model="poet")]
    await other.runtime.close()
    await poetic.until(lambda: served(poetic) == {"clerk", "m"})
    answers.append(await poetic.chat(model="poet"))
    await change(poetic.poet)
    await poetic.until(lambda: served(poetic) == {"m"})
    answers.append(await poetic.chat(model="clerk"))
    counted = await poetic.metrics()

    assert [one.status_code for one in answers] == [200, 503, 404]
    announced_names = map(poetic.frontend.models.announced_name, ("poet", "clerk"))
    assert list(announced_names) == ["m", "clerk"]
    assert counted['dynamo_frontend_model_workers{model="poet"}'] == 0  # for which an alert waits
    assert 'dynamo_frontend_model_workers{model="clerk"}' not in counted
    assert 'dynamo_frontend_model_ready{model="clerk"}' not in counted


async def test_updated_card_changes_the_adapters(poetic):
    before = poetic.frontend.models.find("clerk")
    await change(poetic.poet, "clerk", "singer")
    await poetic.until(lambda: served(poetic) == {"clerk", "m", "singer"})

    assert poetic.frontend.models.find("clerk") is before  # whoever waits for it is not forgotten


async def test_workers_are_listed_and_cleared_once_with_adapters(poetic):
    health = (await poetic.client.get("/health")).json()
    cleared = (await poetic.client.post("/clear_kv_blocks")).json()

    assert len(health["instances"]) == 2
    assert len(cleared["failed_workers"]) == 2  # ours take no such calls


async def test_base_model_takes_precedence_over_an_adapter_name(poetic, caplog):
    poet = await poetic.register(Worker, "poet", OTHER)
    await poetic.until(lambda: "refused the adapter 'poet' of 'm'" in caplog.text)
    as_model = await parents(poetic)
    await poetic.chat(model="poet")
    await poet.runtime.close()
    await poetic.until(lambda: poetic.frontend.models.find("poet").base is not None)

    assert as_model == {"clerk": "m", "m": None, "poet": None}
    assert [one.lora_name for one in poet.requests] == [None]
    assert await parents(poetic) == {"clerk": "m", "m": None, "poet": "m"}


async def test_adapter_of_the_older_model_takes_precedence(poetic, caplog):
    other = await poetic.register(Worker, "n", OTHER, lora_names=("poet", "singer"))
    await poetic.until(lambda: "singer" in served(poetic))

    assert (await parents(poetic))["poet"] == "m"
    assert "refused the adapter 'poet' of 'n'" in caplog.text

    await poetic.poet.runtime.close()
    await poetic.until(lambda: poetic.frontend.models.find("poet").base.name == "n")
    await poetic.chat(model="poet")

    assert [one.lora_name for one in other.requests] == ["poet"]


async def test_refused_worker_adds_no_adapters(rig, caplog):
    stranger = await rig.register(Worker, "m", OTHER, files={}, lora_names=("poet",))
    await rig.until(lambda: "refused instance" in caplog.text)

    assert served(rig) == {"m"}
    assert not stranger.requests


async def test_adapter_requests_count_as_load_of_the_base_model(bare):
    await bare.start(routing=config.RoutingConfig(router_mode="kv"))
    workers = [await bare.worker(lora_names=("poet",)), await bare.worker()]
    for worker in workers:
        worker.script = lambda call, request: None  # it takes its time
    asked = [("poet", "x" * 90), ("m", "y" * 90), ("poet", "z" * 90)]
    for number, (model, prompt) in enumerate(asked):
        bare.start_task(bare.complete(prompt, model=model))
        await bare.until(lambda n=number: sum(len(one.calls) for one in workers) == n + 1)

    assert [[one.lora_name for one in worker.requests] for worker in workers] == [
        ["poet", "poet"],
        [None],  # the other one was busy
    ]


@pytest.mark.parametrize("has_adapter", [True, False])
async def test_adapter_prompt_goes_to_a_prefill_worker_with_the_adapter_or_stays(bare, has_adapter):
    await bare.start(
        routing=config.RoutingConfig(router_mode="kv"),
        prefill=disagg_config.PrefillRoutingConfig(max_local_prefill_length=0),
    )
    kinds, params = model_card.WorkerType, kv_params.of_connector(remote_block_ids=[1])
    names = ("poet",)
    decode = await bare.worker(worker_type=kinds.DECODE, lora_names=names)
    prefills = [
        await bare.register(Worker, "m", PREFILL, worker_type=kinds.PREFILL, lora_names=told)
        for told in ((), names if has_adapter else ())
    ]
    for one in prefills:
        done = generate.FinishReason.LENGTH
        one.script = [generate.Output((1,), done, kv_transfer_params=params)]
    (route,) = [one.route for one in bare.frontend.models.find("m").replicas.values()]
    await bare.until(lambda: route._prefill and len(route._prefill.instance_ids) == 2)
    longer_than_a_block = [f"{number} of these words" for number in range(3)]
    answers = [await bare.chat(text, model="poet") for text in longer_than_a_block]

    assert [one.status_code for one in answers] == [200] * 3
    assert [len(one.requests) for one in prefills] == [0, 3 if has_adapter else 0]
    assert {one.lora_name for worker in prefills for one in worker.requests} <= {"poet"}
    given = params if has_adapter else kv_transfer.COMPUTE_LOCALLY
    assert [one.kv_transfer_params for one in decode.requests] == [given] * 3
