"""The route that clears the prefix caches of all workers."""

from frontend_rig import Worker

from dynamo.base import errors
from dynamo.protocols import instances, model_card

NAME = instances.EndpointName("dynamo", "backend", "clear_kv_blocks")
DONE = {"status": "success", "message": "KV cache cleared"}


def clears(call):
    call.reply(DONE)
    call.finish()


async def test_outcome_of_each_worker_is_reported(rig):
    other = await rig.worker("other")
    await rig.one.runtime.register(NAME, clears)
    await other.runtime.register(NAME, lambda call: call.fail(errors.EngineFailed("it is dead")))
    answer = await rig.client.post("/clear_kv_blocks")
    id_of = {"m": rig.one.runtime.instance_id, "other": other.runtime.instance_id}

    assert answer.status_code == 200
    assert answer.json() == {
        "cleared_workers": [
            {
                "name": f"m-instance-{id_of['m']:x}",
                "endpoint": "dyn://dynamo.backend.clear_kv_blocks",
                "status": "cleared",
                "response": DONE,
            }
        ],
        "failed_workers": [
            {
                "name": f"other-instance-{id_of['other']:x}",
                "endpoint": "dyn://dynamo.backend.clear_kv_blocks",
                "status": "failed: it is dead",
                "response": None,
            }
        ],
    }


async def test_worker_that_fails_is_named(rig):
    other = await rig.worker("other")
    await other.runtime.register(NAME, clears)
    told = (await rig.client.post("/clear_kv_blocks")).json()

    assert [one["name"].partition("-")[0] for one in told["cleared_workers"]] == ["other"]
    assert "no instance" in told["failed_workers"][0]["status"]


async def test_response_without_workers_says_so(bare):
    await bare.start()

    assert (await bare.client.post("/clear_kv_blocks")).json() == {
        "message": "No active worker groups found"
    }


async def test_prefill_workers_are_cleared_too(rig):
    endpoint = instances.EndpointName("dynamo", "prefill", "generate")
    prefill = await rig.register(Worker, "m", endpoint, worker_type=model_card.WorkerType.PREFILL)
    at = instances.EndpointName("dynamo", "prefill", "clear_kv_blocks")
    await prefill.runtime.register(at, clears)
    await rig.one.runtime.register(NAME, clears)
    await rig.until(lambda: rig.frontend.models.prefill_workers)
    cleared = (await rig.client.post("/clear_kv_blocks")).json()["cleared_workers"]
    await prefill.runtime.close()
    await rig.until(lambda: not rig.frontend.models.prefill_workers)
    then = (await rig.client.post("/clear_kv_blocks")).json()

    assert [one["endpoint"] for one in cleared] == [str(NAME), str(at)]
    assert len(then["cleared_workers"]) == 1
    assert not then["failed_workers"]
