"""Models appear and vanish with their workers."""

import shutil

import pytest
from frontend_rig import card_of

from dynamo.protocols import generate, instances, model_card
from dynamo.runtime import component


async def names(rig):
    return [model["id"] for model in (await rig.client.get("/v1/models")).json()["data"]]


async def test_model_appears_with_its_first_worker_and_vanishes_with_its_last(bare):
    await bare.start()
    seen = [await names(bare)]
    one = await bare.worker()
    two = await bare.worker()
    seen.append(await names(bare))
    await one.runtime.close()
    await bare.until(lambda: len(bare.instances) == 1)
    seen.append(await names(bare))
    await two.runtime.close()
    await bare.until(lambda: not bare.instances)
    seen.append(await names(bare))

    assert seen == [[], ["m"], ["m"], []]


async def test_worker_that_started_before_the_frontend_is_found(bare):
    await bare.start()
    await bare.worker()

    assert await names(bare) == ["m"]


@pytest.fixture
def other_dir(model_dir, tmp_path):
    """A model of other files."""
    folder = tmp_path / "other"
    shutil.copytree(model_dir, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    return folder


async def clashing(rig, folder):
    """A worker that serves other files under the same name, registered but refused."""
    runtime = await rig._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(rig.cluster, item_type=generate.Output)
    )
    name = instances.EndpointName("dynamo", "other", "generate")
    return await runtime.register(name, lambda call: call.finish(), card_of(folder).record_for)


async def test_later_worker_with_other_files_is_refused(rig, other_dir, caplog):
    await clashing(rig, other_dir)
    await rig.until(lambda: "refused instance" in caplog.text)

    assert [one.component for one in rig.instances] == ["backend"]
    assert (await rig.chat()).status_code == 200


async def test_refused_worker_is_served_once_the_others_are_gone(rig, other_dir, caplog):
    second = await clashing(rig, other_dir)
    await rig.until(lambda: "refused instance" in caplog.text)
    await rig.one.runtime.close()
    await rig.until(lambda: rig.instances == [second])

    assert await names(rig) == ["m"]


async def test_model_with_unreadable_files_is_not_listed_and_requests_say_why(
    rig, tmp_path, model_dir, caplog
):
    folder = tmp_path / "gone"
    shutil.copytree(model_dir, folder)
    card = card_of(folder, "lost")
    shutil.rmtree(folder)
    runtime = await rig._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(rig.cluster, item_type=generate.Output)
    )
    name = instances.EndpointName("dynamo", "other", "generate")
    await runtime.register(name, lambda call: call.finish(), card.record_for)
    await rig.until(lambda: "cannot serve the model 'lost'" in caplog.text)
    answer = await rig.chat(model="lost")
    counted = await rig.metrics()

    assert await names(rig) == ["m"]
    assert counted['dynamo_frontend_model_ready{model="lost"}'] == 0
    assert "serving the model 'lost'" not in caplog.text
    assert answer.status_code == 503
    assert "cannot read" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b"null"])
async def test_malformed_card_is_ignored(rig, value, caplog):
    await rig.one.runtime.discovery.put(instances.CARDS + "a/b/c/1", value)
    await rig.until(lambda: "ignored the model card" in caplog.text)

    assert await names(rig) == ["m"]


async def test_only_the_configured_namespace_is_served(bare):
    await bare.start(namespace="mine")
    runtime = await bare._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(bare.cluster, item_type=generate.Output)
    )
    for namespace, name in (("theirs", "a"), ("mine", "b")):
        endpoint = instances.EndpointName(namespace, "backend", "generate")
        await runtime.register(
            endpoint, lambda call: call.finish(), card_of(bare.model_dir, name).record_for
        )
    await bare.until(lambda: bare.instances)

    assert await names(bare) == ["b"]


async def test_facts_of_the_card_are_shown_in_metrics(rig):
    await rig.worker("Big", runtime_config=model_card.ModelRuntimeConfig(total_kv_blocks=77))
    counted = await rig.metrics()

    assert counted['dynamo_frontend_model_total_kv_blocks{model="big"}'] == 77
    assert counted['dynamo_frontend_model_context_length{model="m"}'] == 200
    assert counted['dynamo_frontend_model_workers{model="m"}'] == 1
    assert counted['dynamo_frontend_model_ready{model="m"}'] == 1


async def test_model_without_workers_is_not_ready_in_metrics(rig):
    await rig.one.runtime.close()
    await rig.until(lambda: not rig.instances)
    counted = await rig.metrics()

    assert counted['dynamo_frontend_model_workers{model="m"}'] == 0
    assert counted['dynamo_frontend_model_ready{model="m"}'] == 0


async def test_very_long_model_name_is_not_echoed_in_full(rig):
    answer = await rig.chat(model="x" * 10_000)

    assert answer.status_code == 404
    assert len(answer.content) < 500
